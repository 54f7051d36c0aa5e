"""A request that waits for a place, and another coordinator that answers for its session meanwhile."""

from __future__ import annotations

import gc
import weakref
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import redis
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from outrider.base.aio import cancel_all
from outrider.base.aio import until as soon
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.errors import Fenced, PeerLost
from outrider.protocol.speculation import FinishReason
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Redis, ask, client, in_process
from tests.contract.conftest import HEARTBEAT_MS, slowed, verifier_serving

pytestmark = pytest.mark.timeout(120)

LONG = ask("It takes its time. ", temperature=0.0, max_tokens=1500, ignore_eos=True, gamma=0)
SHORT = ask("It takes a moment. ", temperature=0.0, max_tokens=30, ignore_eos=True, gamma=0)


async def test_what_another_coordinator_does_with_it_ends_it_here(
    loaded: LoadedModel, redis_server: Redis, tmp_path: Path
) -> None:
    """It writes nothing while it waits. It kept its place here for as long as the one before it ran."""
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=30)
    here, there = (CoordinatorService(settings, redis_server.url) for _ in range(2))
    async with AsyncExitStack() as stack:
        address, other = [await stack.enter_async_context(in_process(each, settings)) for each in (here, there)]
        serving = verifier_serving(loaded, tmp_path, coordinators=address, max_sessions=1)
        await stack.enter_async_context(serving)
        for service in (here, there):
            assert await soon(lambda: service.sessions.ready, 20)  # noqa: B023
        stub, others = [await stack.enter_async_context(client(each)) for each in (address, other)]
        stack.enter_context(slowed(loaded, 0.02))
        running = stub.Generate(LONG, timeout=100)
        while not (await running.read()).HasField("chunk"):
            pass
        cancelled, resumed = [stub.Generate(LONG, timeout=100) for _ in range(2)]
        ids = [(await call.read()).started.session_id for call in (cancelled, resumed)]
        live = here.sessions.live
        assert [session.stats.waiting for session in live] == [False, True, True]

        assert (await others.Cancel(pb.CancelRequest(session_id=ids[0]), timeout=10)).cancelled
        assert (await cancelled.read()).complete.finish_reason == FinishReason.CANCELLED
        assert await cancelled.read() is grpc.aio.EOF
        taken = others.Resume(pb.ResumeRequest(session_id=ids[1]), timeout=100)
        assert (await taken.read()).started.session_id == ids[1]
        assert (await resumed.read()).error.code == Fenced.code
        assert await soon(lambda: len(here.sessions.live) == 1, 5)
        assert not live[0].ended, "those ends are not its end"
        taken.cancel()
        running.cancel()


@pytest.mark.parametrize("how", ["the connection is lost", "they are cancelled"])
async def test_sessions_of_a_lost_verifier_are_gone_without_a_garbage_collection(
    loaded: LoadedModel, redis_server: Redis, tmp_path: Path, how: str
) -> None:
    """The error of their shared stream kept them all, or that of a late verdict its session. Collections are rare."""
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=30)
    service = CoordinatorService(settings, redis_server.url)
    with redis.Redis.from_url(redis_server.url) as store:
        store.flushall()  # the verifier of another test may stay for five heartbeats, and be lost as well
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(in_process(service, settings))
        await stack.enter_async_context(verifier_serving(loaded, tmp_path, coordinators=address))
        assert await soon(lambda: service.sessions.ready, 20)
        (verifier,) = service.sessions.worker_pool.connections()
        assert await soon(lambda: verifier._calls.shared is not None, 20)
        stub = await stack.enter_async_context(client(address))
        stack.enter_context(slowed(loaded, 0.02))
        calls = [stub.Generate(SHORT, timeout=100) for _ in range(3)]
        for call in calls:
            while not (await call.read()).HasField("chunk"):
                pass
        lines = stack.enter_context(capture_logs())
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        held = [weakref.ref(each) for each in (*service.sessions.live, *verifier.streams)]
        assert len(held) == 6
        if how == "they are cancelled":
            for stream in [*verifier.streams]:
                stream.cancel(PeerLost("its verdict is overdue"))
            del stream
        else:
            await cancel_all([*verifier._calls._running])
        for call in calls:
            while not (await call.read()).HasField("complete"):
                pass
        assert [line["event"] for line in lines].count("verifier lost") == 3
        assert await soon(lambda: not service.sessions.live, 10)
        assert await soon(lambda: not [each for each in held if each() is not None], 5)
