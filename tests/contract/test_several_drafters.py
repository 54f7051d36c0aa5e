"""Several drafters on one session, and hidden states on their way to those that want them: all over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import LlamaForCausalLM

from coordinator.api.service import CoordinatorService
from drafter.interface import DraftRequest
from drafter.service import DrafterService
from outrider.base.aio import until
from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.speculation import Guess, TokenKind
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.testing.link_emulator import EmulatedLink, LinkShape
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import Output, Redis, ask, client, failure, follow, free_port, generate, in_process
from tests.conftest import Models
from tests.contract.conftest import (
    HEARTBEAT_MS,
    HOME_LENGTH,
    HOME_PROMPT,
    Greedy,
    Home,
    after_joining,
    drafter_serving,
    slowed,
    soon,
    verifier_serving,
)

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def modelled(home: Home, models: Models, delay_ms: float = 0.0) -> AsyncIterator[EmulatedLink]:
    """A drafter with a model; the link to it."""
    port = free_port()
    flags = {"kind": "model", "model": str(models.draft), "device": "cpu", "port": port}
    async with (
        EmulatedLink("127.0.0.1", port, LinkShape(delay_ms=delay_ms)) as link,
        drafter_serving(**flags, coordinators=home.coordinator, advertise=link.address),
    ):
        yield link


@asynccontextmanager
async def both(home: Home, models: Models, joining: int = 2) -> AsyncIterator[EmulatedLink]:
    """A drafter of each kind, so many of which join each session; the link to the one with a model."""
    async with drafter_serving(kind="ngram", coordinators=home.coordinator), modelled(home, models) as link:
        await home.knows(2)
        with after_joining(home.loaded, home.service, joining):
            yield link
    await home.knows(0)


def shares(output: Output) -> dict[str, pb.DrafterShare]:
    return {share.kind: share for share in output.stats.drafters}


# Two at once.


async def test_two_drafters_guess_for_one_session(
    home: Home, models: Models, loaded: LoadedModel, greedy: Greedy
) -> None:
    async with both(home, models):
        output = await home.answer(gamma=4, temperature=0.0)
        adaptive = await home.answer(temperature=0.0)
    assert output.token_ids == adaptive.token_ids == greedy(loaded.tokenizer.encode(HOME_PROMPT), HOME_LENGTH)
    assert output.stats.drafter_losses == 0
    share = shares(output)
    assert {share["ngram"].attached_order, share["model"].attached_order} == {1, 2}
    assert share["ngram"].guessed > 0
    assert share["model"].accepted > 0
    assert max(one.accepted for one in share.values()) <= output.stats.accepted_tokens
    assert sum(one.accepted for one in share.values()) >= output.stats.accepted_tokens


@pytest.mark.parametrize("branches", [None, 3])
async def test_drawn_text_does_not_depend_on_who_guesses(home: Home, models: Models, branches: int | None) -> None:
    plain = await home.answer(gamma=0, seed=5)
    async with both(home, models):
        output = await home.answer(gamma=4, branches=branches, seed=5)
    assert (output.token_ids, output.text) == (plain.token_ids, plain.text)
    assert set(shares(output)) == {"ngram", "model"}


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
async def test_modes_with_probabilities(home: Home, models: Models, mode: int) -> None:
    async with both(home, models):
        output = await home.answer(gamma=4, seed=5, verification=mode)
    assert len(output.token_ids) == HOME_LENGTH
    assert output.stats.accepted_tokens > 0
    assert output.stats.drafter_losses == 0
    assert set(shares(output)) == {"ngram", "model"}


@pytest.mark.timeout(180)  # the plain text of four times the usual length may take a minute
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
async def test_a_drafter_that_opens_late_has_what_was_committed_meanwhile(
    home: Home, models: Models, loaded: LoadedModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """Between its attachment and its opening it gets neither work nor blame, and afterwards its guesses hold."""
    late, open_session = asyncio.Event(), DrafterService._grammar_cursor

    async def open_late(service: DrafterService, opening: Any) -> Any:
        if service._settings.kind == "model":
            await late.wait()
        return await open_session(service, opening)

    def release(output: Output) -> None:
        if len(output.token_ids) >= HOME_LENGTH // 2:
            late.set()

    monkeypatch.setattr(DrafterService, "_grammar_cursor", open_late)
    length = 4 * HOME_LENGTH
    request = ask(HOME_PROMPT, temperature=0.0, max_tokens=length, ignore_eos=True, gamma=4)
    async with AsyncExitStack() as stack:
        if beside:
            await stack.enter_async_context(drafter_serving(kind="ngram", coordinators=home.coordinator))
        await stack.enter_async_context(modelled(home, models))
        await home.knows(1 + beside)
        stub = await stack.enter_async_context(client(home.coordinator))
        stack.enter_context(slowed(loaded, 0.01))
        output = await follow(stub.Generate(request, timeout=50), Output(), release)
    await home.knows(0)
    assert output.token_ids == greedy(loaded.tokenizer.encode(HOME_PROMPT), length)
    assert output.stats.drafter_losses == 0
    assert shares(output)["model"].accepted > HOME_LENGTH
    if not beside:
        assert TokenKind.ACCEPTED not in output.kinds[: HOME_LENGTH // 2], "it had not opened"


@pytest.mark.timeout(180)
async def test_a_drafter_that_lost_its_sessions_guesses_for_the_same_stream_again(
    home: Home, models: Models, loaded: LoadedModel, greedy: Greedy
) -> None:
    """As one that was restarted. The loss is told in the log and in the statistics, and costs guesses for a moment."""
    length, cut_at = 4 * HOME_LENGTH, list[int]()
    request = ask(HOME_PROMPT, temperature=0.0, max_tokens=length, ignore_eos=True, gamma=4)
    async with modelled(home, models) as link, client(home.coordinator) as stub:
        await home.knows(1)

        def cut(output: Output) -> None:
            if not cut_at and TokenKind.ACCEPTED in output.kinds:
                link.cut()
                cut_at.append(len(output.kinds))

        with slowed(loaded, 0.02), capture_logs() as logs:
            output = await follow(stub.Generate(request, timeout=50), Output(), cut)
    await home.knows(0)
    assert output.token_ids == greedy(loaded.tokenizer.encode(HOME_PROMPT), length)
    assert output.stats.drafter_losses == 1
    assert [entry["event"] for entry in logs].count("drafter lost") == 1
    assert TokenKind.ACCEPTED in output.kinds[cut_at[0] + HOME_LENGTH // 4 :]


async def test_losing_one_of_two_changes_nothing_in_the_text(home: Home, models: Models, loaded: LoadedModel) -> None:
    """Its connection is cut in the middle and does not come back; the other goes on."""
    lost = threading.Event()

    def noticed() -> bool:
        stats = next(iter(home.service.sessions.live)).stats
        guessed = "model" in stats._kinds and stats._kinds["model"].guessed > 0
        return stats.drafter_losses > 0 if lost.is_set() else guessed

    length = 600
    plain = await home.answer(gamma=0, temperature=0.0, max_tokens=length)
    request = ask(HOME_PROMPT, temperature=0.0, max_tokens=length, ignore_eos=True, gamma=4)
    async with both(home, models) as link, client(home.coordinator) as stub:
        assert await soon(lambda: bool(link.connections), 10)

        def cut(output: Output) -> None:
            if len(output.token_ids) > 100 and link.connections:
                link.cut(refuse=True)
                lost.set()

        joined = loaded.engine.extend

        def extend_when_noticed(batch: Sequence[SessionTokens]) -> StepResult:
            """Hold the steps until the drafter has guessed, then until its loss is known: the toy would end before."""
            deadline = time.monotonic() + 20
            while not noticed():
                assert time.monotonic() < deadline, "its guess or its loss is not known"
                time.sleep(0.001)
            return joined(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded.engine, "extend", extend_when_noticed)
            output = await follow(stub.Generate(request, timeout=60), Output(), cut)
        link.heal()
    assert output.token_ids == plain.token_ids
    assert output.stats.drafter_losses >= 1
    assert output.stats.failovers == 0
    assert 0 < shares(output)["model"].guessed < length, "it was there and was lost"
    assert output.stats.drafter == "ngram"


async def test_one_drafter_each_when_that_is_the_setting(
    loaded: LoadedModel, models: Models, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, drafters_per_session=1)
    apart = redis_server.url.removesuffix("0") + "1"  # or it would hear of the other home's workers
    service = CoordinatorService(settings, apart)
    async with in_process(service, settings) as coordinator:
        folder = tmp_path_factory.mktemp("tokenizer")
        async with verifier_serving(loaded, folder, coordinators=coordinator):
            home = Home(coordinator, service, loaded)
            async with both(home, models, joining=1):
                output = await home.answer(gamma=4, temperature=0.0)
    assert len(output.stats.drafters) == 1


async def test_never_two_of_one_model(home: Home) -> None:
    async with (
        drafter_serving(kind="ngram", coordinators=home.coordinator),
        drafter_serving(kind="ngram", coordinators=home.coordinator),
    ):
        await home.knows(2)
        links = home.service.sessions.worker_pool.connections
        most = 0
        with after_joining(home.loaded, home.service):
            running = asyncio.create_task(home.answer(gamma=4, temperature=0.0, max_tokens=400))
            while not running.done():
                most = max(most, sum(link.sessions for link in links() if link.info.kind == "ngram"))
                await asyncio.sleep(0)
        assert len((await running).stats.drafters) == 1
    await home.knows(0)
    assert most == 1


async def test_who_passes_at_once_does_not_cut_short_the_wait_for_the_other(home: Home, models: Models) -> None:
    request = ask(HOME_PROMPT, temperature=0.0, max_tokens=200, ignore_eos=True, gamma=4, patience_us=2_000_000)
    async with listening(home, Listener()), modelled(home, models, delay_ms=5.0), client(home.coordinator) as stub:
        await home.knows(2)
        with after_joining(home.loaded, home.service, drafters=2):
            output = await generate(stub, request)
    await home.knows(0)
    assert set(shares(output)) == {"listener", "model"}
    assert output.stats.drafts > 0.6 * output.stats.steps, "all but the prompt's"


async def test_who_sends_nonsense_is_left_alone_and_the_other_stays(home: Home, models: Models) -> None:
    plain = await home.answer(gamma=0, seed=5)
    async with listening(home, Babbler()), modelled(home, models):
        await home.knows(2)
        with after_joining(home.loaded, home.service, drafters=2):
            output = await home.answer(gamma=4, seed=5)
    await home.knows(0)
    assert output.token_ids == plain.token_ids
    assert output.stats.drafter_losses == 1
    assert output.stats.drafter == "model"
    assert shares(output)["model"].accepted > 0


async def test_branches_are_checked(home: Home) -> None:
    for branches in (0, 9):
        request = ask(HOME_PROMPT)
        request.speculation.branches = branches
        async with client(home.coordinator) as stub:
            code, _, typed = await failure(stub.Generate(request, timeout=10))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (typed.field, typed.value, typed.limit) == ("speculation.branches", str(branches), "in [1, 8]")


# Hidden states.


class Listener:
    """A drafter that wants hidden states, keeps what it is given, and guesses nothing. `pause_s` holds sessions up."""

    needs_hidden_states = True

    def __init__(self, name: str = "listener", pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.info = ModelInfo(name=name, fingerprint=name)
        self.vocabulary: Vocabulary | None = None
        self.heard: dict[str, list[HiddenStates]] = {}
        self.ended = threading.Event()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        time.sleep(self.pause_s)
        for one in requests:
            self.heard.setdefault(one.session, []).extend(one.hidden_states)
        return [request.chain(done=True) for request in requests]

    def forget(self, session: str) -> None:
        self.ended.set()

    def rows(self) -> tuple[int, np.ndarray]:
        """Position of the first and all of them, without a gap."""
        (heard,) = self.heard.values()
        at = heard[0].position
        for features in heard:
            assert features.position == at
            at += len(features.rows) // 2 // features.width
        return heard[0].position, np.concatenate(
            [np.frombuffer(features.rows, dtype="<f2").reshape(-1, features.width) for features in heard]
        )


class Mute(Listener):
    """Wants nothing."""

    needs_hidden_states = False


class Babbler(Listener):
    """Guesses what there is not."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [request.chain([1_000_000], done=True) for request in requests]


@asynccontextmanager
async def listening(home: Home, listener: Listener) -> AsyncIterator[None]:
    settings = DrafterSettings(kind="listener", coordinators=home.coordinator)
    links = home.service.sessions.worker_pool.connections
    before = len(links())
    async with in_process(DrafterService(listener, settings), settings):
        assert await until(lambda: len(links()) == before + 1, 20)
        yield
    assert await until(lambda: len(links()) == before, 20)


def check_rows(listener: Listener, target: LlamaForCausalLM, tokens: list[int]) -> int:
    """They are what the model says; the position of the first."""
    first, rows = listener.rows()
    with torch.inference_mode():
        hidden = target.model(torch.tensor([tokens])).last_hidden_state[0]
    np.testing.assert_allclose(rows, hidden[first : first + len(rows)].numpy(), rtol=2e-3, atol=2e-3)
    return first


async def stream(home: Home, tokens: list[int], output: Output, **params: Any) -> AsyncIterator[Output]:
    """The output as it grows."""
    request = ask(tokens, temperature=0.0, ignore_eos=True, gamma=4, **params)
    request.cache_salt = str(id(output))  # what is cached of a prompt has no states to send
    async with client(home.coordinator) as stub:
        call = stub.Generate(request, timeout=60)
        async for reply in call:
            output.token_ids.extend(reply.chunk.token_ids)
            output.stats = reply.complete.stats
            yield output


async def test_hidden_states_reach_the_drafter_from_the_prompt_on(home: Home, plain_target: LlamaForCausalLM) -> None:
    listener = Listener()
    prompt = [(3 * i) % 250 for i in range(60)]
    output = Output()
    async with listening(home, listener):
        with after_joining(home.loaded, home.service):
            async for _ in stream(home, prompt, output, max_tokens=40):
                pass
        assert await until(listener.ended.is_set, 5)
    assert check_rows(listener, plain_target, prompt + output.token_ids) == 0
    _, rows = listener.rows()
    assert len(rows) > len(prompt), "and of the output"
    assert output.stats.feature_bytes >= rows.nbytes


async def test_a_later_drafter_gets_what_was_kept(home: Home, plain_target: LlamaForCausalLM) -> None:
    early, late = Listener("early", pause_s=0.01), Listener("late")  # so that the late one comes before the end
    prompt = [(7 * i) % 250 for i in range(90)]
    output = Output()
    came = False
    async with listening(home, early), AsyncExitStack() as stack:
        with after_joining(home.loaded, home.service):
            async for _ in stream(home, prompt, output, max_tokens=500):
                if len(output.token_ids) > 20 and not came:
                    came = True
                    await stack.enter_async_context(listening(home, late))
                elif any(late.heard.values()):
                    early.pause_s = 0.0
        assert await until(late.ended.is_set, 5)
    tokens = prompt + output.token_ids
    assert check_rows(early, plain_target, tokens) == 0
    check_rows(late, plain_target, tokens)
    ((kept, *_),) = late.heard.values()
    assert 20 < len(kept.rows) // 2 // kept.width <= 256, "all at once, with the first message"


async def test_hidden_states_are_asked_for_when_somebody_wants_them_and_not_longer(
    home: Home, plain_target: LlamaForCausalLM
) -> None:
    listener = Listener()
    prompt = [(11 * i) % 250 for i in range(50)]
    output = Output()
    asked: list[bool] = []
    came = False
    mute = Mute("mute", pause_s=0.01)  # holds the session up, so that the listener comes before the end
    async with listening(home, mute), AsyncExitStack() as stack:
        with after_joining(home.loaded, home.service):
            async for _ in stream(home, prompt, output, max_tokens=500):
                session = next(iter(home.service.sessions.live), None)
                asked.append(session is not None and bool(session.drafting._states.requested))
                if len(output.token_ids) > 20 and not came:
                    assert not any(asked), "nobody wanted any"
                    came = True
                    await stack.enter_async_context(listening(home, listener))
                elif listener.heard and any(listener.heard.values()) and not listener.ended.is_set():
                    await stack.aclose()
                    mute.pause_s = 0.0
    first = check_rows(listener, plain_target, prompt + output.token_ids)
    assert first >= len(prompt) + 20
    assert any(asked)
    assert not asked[-1]
