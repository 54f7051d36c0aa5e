"""Sessions on one machine with their drafter, over real sockets: those that decode plain tokens ask for no states."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from coordinator.sessions.drafter_stream import DrafterStream
from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.loading.loader import LoadedModel
from outrider.engine.throttled import ThrottledEngine
from outrider.models.tokenizer import save_tokenizer
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import PeerLost
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.verifier import VerifierSettings
from tests.cluster import Output, Redis, ask, client, follow, in_process
from tests.contract.conftest import HEARTBEAT_MS, Greedy, Home
from tests.contract.test_several_drafters import Listener, listening
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService

pytestmark = pytest.mark.timeout(60)

STEEP = CostCurve.line(2.0, 2.0)  # every token of a step costs as much as the first: guesses never pay beside others
WIDTH_BYTES = 2  # of a value of a hidden state


@pytest_asyncio.fixture(loop_scope="session")
async def steep(loaded: LoadedModel, redis_server: Redis, tmp_path: Path) -> AsyncIterator[Home]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=5)
    service = CoordinatorService(settings, redis_server.url.removesuffix("0") + "2")
    async with in_process(service, settings) as coordinator, _verifier(loaded, tmp_path, coordinator):
        home = Home(coordinator, service, loaded)
        await home.knows(0)
        yield home


@asynccontextmanager
async def _verifier(loaded: LoadedModel, folder: Path, coordinator: str) -> AsyncIterator[None]:
    settings = VerifierSettings(coordinators=coordinator)
    files = save_tokenizer(loaded.tokenizer, folder)
    engine = ThrottledEngine(loaded.engine, STEEP)  # slow enough for the others to come before the first ends
    service = VerifierService(EngineTarget(engine), loaded.vocabulary, files, settings, STEEP)
    async with in_process(service, settings):
        yield


async def test_beside_others_a_session_that_does_not_guess_sends_no_hidden_states(
    steep: Home, loaded: LoadedModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is alone for a while, and its drafter gets them. The later ones never attach theirs."""
    extend, together = loaded.engine.extend, threading.Event()

    def extend_beside_others(batch: Sequence[SessionTokens]) -> StepResult:
        """Let the first one wait for the later ones, which a busy machine may start late."""
        deadline = time.monotonic() + 20
        while begun.is_set() and not together.is_set():
            assert time.monotonic() < deadline, "the later ones have not begun"
            if len(steep.service.sessions.live) == len(prompts):
                together.set()
            time.sleep(0.001)
        return extend(batch)

    monkeypatch.setattr(loaded.engine, "extend", extend_beside_others)
    listener, begun = Listener(), asyncio.Event()
    prompts = [[(first * index + first) % 250 for index in range(40)] for first in (3, 5, 7, 11)]
    lengths = [150, 150, 150, 150]

    async def answer(number: int) -> Output:
        def note(output: Output) -> None:
            if len(output.token_ids) > 20:
                begun.set()

        request = ask(prompts[number], temperature=0.0, ignore_eos=True, max_tokens=lengths[number])
        async with client(steep.coordinator) as stub:
            return await follow(stub.Generate(request, timeout=50), Output(), note)

    async with listening(steep, listener):
        first = asyncio.create_task(answer(0))
        await begun.wait()
        outputs = await asyncio.gather(first, *map(answer, (1, 2, 3)))
    row_bytes = WIDTH_BYTES * loaded.engine.state_shape[1]
    alone, *others = [output.stats.feature_bytes / row_bytes for output in outputs]
    assert 40 <= alone < 40 + 0.7 * lengths[0], "those of the prompt, and no more since the others have come"
    assert others == [0, 0, 0]
    assert outputs[0].token_ids == greedy(prompts[0], lengths[0])


async def test_a_drafter_that_is_lost_before_it_joined_costs_nothing_but_itself(
    steep: Home, loaded: LoadedModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[DrafterStream] = []

    async def lost(stream: DrafterStream) -> None:
        tries.append(stream)
        raise PeerLost(f"{stream.connection.info.address} is gone")

    monkeypatch.setattr(DrafterStream, "opened", lost)
    prompt = list(range(40))
    request = ask(prompt, temperature=0.0, ignore_eos=True, max_tokens=60)
    async with listening(steep, Listener()), client(steep.coordinator) as stub:
        output = await follow(stub.Generate(request, timeout=50), Output())
    assert output.token_ids == greedy(prompt, 60)
    assert tries
    assert output.stats.drafter_losses == 0
