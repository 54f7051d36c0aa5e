"""A session leaves a verifier that drains, also when the verifier's registration broke off and came back meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until
from outrider.base.grpc_options import channel_options
from outrider.engine.loading.loader import EngineOptions, LoadedModel, load_model
from outrider.engine.throttled import ThrottledEngine, parse_pace
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import Output, ask, client, follow, in_process
from tests.conftest import Models
from tests.contract.conftest import Greedy, verifier_serving

pytestmark = pytest.mark.timeout(60)

NO_REDIS = "redis://127.0.0.1:1"
PROMPT = "Where one leaves, another goes on. "
LENGTH = 80


@dataclass(frozen=True, slots=True)
class Desk:
    """Where verifiers are registered by hand."""

    address: str
    service: CoordinatorService
    loaded: LoadedModel

    @asynccontextmanager
    async def registered(self, worker_id: str, address: str) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self.address, options=channel_options()) as channel:
            call: Any = rpc.RegistryStub(channel).Register(timeout=30)  # type: ignore[call-arg]
            await self.say(call, worker_id, address)
            assert (await call.read()).accepted
            try:
                yield call
            finally:
                call.cancel()

    async def say(self, call: Any, worker_id: str, address: str, *, draining: bool = False) -> None:
        model = convert.model_to_proto(self.loaded.engine.info)
        worker = pb.Worker(worker_id=worker_id, role=pb.ROLE_VERIFIER, address=address, kind="target", model=model)
        worker.capacity, worker.draining = 8, draining
        await call.write(pb.RegisterRequest(worker=worker))

    def known(self) -> set[str]:
        return {connection.info.worker_id for connection in self.service.sessions.worker_pool.connections()}


def slowly(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, engine=ThrottledEngine(loaded.engine, parse_pace("1:15")))


async def test_a_session_waits_for_its_verifier_where_the_other_one_is_too_small(
    loaded: LoadedModel, models: Models, greedy: Greedy, tmp_path: Path
) -> None:
    """The refusal of the other one was taken for a fault of the request, in the middle of its answer."""
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=200, worker_wait_s=20)
    service = CoordinatorService(settings, NO_REDIS)
    other = load_model(str(models.target), EngineOptions(device="cpu"))
    request = ask(PROMPT, temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    async with (
        in_process(service, settings) as address,
        verifier_serving(other, tmp_path / "small", kv_tokens=64) as small,
        client(address) as stub,
    ):
        desk, output = Desk(address, service, loaded), Output()
        async with desk.registered("small", small):
            with pytest.raises(InvalidRequest, match="cache holds 64 tokens"):  # no other has accepted it
                await follow(stub.Generate(request, timeout=30), Output())
        async with verifier_serving(slowly(loaded), tmp_path / "first") as first, desk.registered("first", first):
            answering = asyncio.create_task(follow(stub.Generate(request, timeout=50), output))
            assert await until(lambda: len(output.token_ids) > 2, 10)
        (session,) = service.sessions.live
        async with desk.registered("small", small):
            assert await until(lambda: "small" in session._verifiers._excluded, 10), "it has refused the session"
            assert not session.ended
            async with verifier_serving(slowly(loaded), tmp_path / "again") as again, desk.registered("again", again):
                await answering
    assert output.token_ids == greedy(loaded.tokenizer.encode(PROMPT), LENGTH)


async def test_a_session_hears_that_its_verifier_drains_after_a_second_registration(
    loaded: LoadedModel, models: Models, greedy: Greedy, tmp_path: Path
) -> None:
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=200, worker_wait_s=5)
    service = CoordinatorService(settings, NO_REDIS)
    other = load_model(str(models.target), EngineOptions(device="cpu"))
    async with (
        in_process(service, settings) as address,
        verifier_serving(slowly(loaded), tmp_path / "first") as first,
        verifier_serving(slowly(other), tmp_path / "second") as second,
        client(address) as stub,
    ):
        desk = Desk(address, service, loaded)
        output = Output()
        async with desk.registered("first", first):
            request = ask(PROMPT, temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
            answering = asyncio.create_task(follow(stub.Generate(request, timeout=30), output))
            assert await until(lambda: len(output.token_ids) > 2, 10)
        assert await until(lambda: not desk.known(), 5)
        (session,) = service.sessions.live
        async with desk.registered("first", first) as call, desk.registered("second", second):
            assert session.record.verifier == "first"
            await desk.say(call, "first", first, draining=True)
            assert await until(lambda: session.record.verifier == "second", 5), "it has moved"
            assert len(output.token_ids) < LENGTH
            await answering
    assert output.token_ids == greedy(loaded.tokenizer.encode(PROMPT), LENGTH)
    assert output.stats.failovers == 0
