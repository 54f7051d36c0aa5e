"""A session on one verifier after another: when it goes on, where, and when it gives up."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.admission.waiting.seats import Seat, Seats
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions import session as session_module
from coordinator.sessions import session_manager
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.session import _EXTRA_TOKENS, MAX_FRUITLESS, Session
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.choosers import NoVerifier
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target
from coordinator.workers.worker_connection import WorkerConnection
from outrider.protocol.errors import Fenced, OutriderError, Overloaded, PeerLost, Unavailable
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import FinishReason, SourceTally, TokenKind, Verdict
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer

NOTHING: Any = None
TARGET = Target(ModelInfo("m", "f", vocab_size=257), byte_tokenizer(), NOTHING, NOTHING, identity="f")
REQUEST = SessionRequest((1, 2), SamplingParams(seed=1, max_tokens=20, temperature=0.0))

Act = Verdict | OutriderError


class ScriptedStream:
    def __init__(self, connection: WorkerConnection, acts: Iterator[Act]) -> None:
        self.connection, self._acts = connection, acts

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def opened(self) -> None:
        pass

    def steer(self, steering: object) -> None:
        pass

    async def replies(self) -> AsyncIterator[Verdict]:
        for act in self._acts:
            if isinstance(act, OutriderError):
                raise act
            yield act


@dataclass
class Stage:
    """Verifiers that do what a script says."""

    manager: SessionManager
    acts: Iterator[Act] = field(default_factory=lambda: iter(()))
    visited: list[str] = field(default_factory=list)
    resumed: list[bool] = field(default_factory=list)  # at each seat

    def stream(self, connection: WorkerConnection, *_: object) -> ScriptedStream:
        self.visited.append(connection.info.worker_id)
        return ScriptedStream(connection, self.acts)

    async def play(self, record: SessionRecord, *acts: Act) -> Session:
        self.acts = iter(acts)
        session = Session(record, TARGET, self.manager._context)
        async with asyncio.timeout(5):
            await session.run()
        return session


def spelt(text: str) -> tuple[int, ...]:
    return TARGET.encode(text, special=False)


def said(at: int, *, last: bool = False) -> Verdict:
    reason = FinishReason.STOP if last else FinishReason.NONE
    return Verdict(len(REQUEST.prompt) + at, (7,), 0, TokenKind.PLAIN, finish_reason=reason)


def drained_after_a_token(verifier: WorkerConnection) -> Iterator[Act]:
    yield said(0)
    verifier.info = replace(verifier.info, draining=True)
    yield said(1)
    yield said(2, last=True)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """With two verifiers that need no rest."""
    stage = Stage(
        SessionManager(CoordinatorSettings(worker_wait_s=1), "redis://127.0.0.1:1", FleetKeys(), lambda: False)
    )
    taken = Seats.taken

    @asynccontextmanager
    async def noted(seats: Seats, *args: Any, resumed: bool) -> AsyncIterator[Seat]:
        stage.resumed.append(resumed)
        async with taken(seats, *args, resumed=resumed) as seat:
            yield seat

    monkeypatch.setattr(Seats, "taken", noted)
    monkeypatch.setattr(session_manager, "_FLUSH_S", 0.01)
    monkeypatch.setattr(session_module, "VerifierStream", stage.stream)
    monkeypatch.setattr(WorkerConnection, "record_failure", lambda connection: None)
    for name in "12":
        await stage.manager.worker_pool.workers.put(WorkerInfo(name, Role.VERIFIER, f"127.0.0.1:{name}", TARGET.info))
    yield stage
    await stage.manager.stop()


async def test_a_session_outlives_any_number_of_verifiers_while_it_gets_tokens(stage: Stage) -> None:
    """It has begun, so it waits behind no new one."""
    losses = 2 * MAX_FRUITLESS
    acts = [act for at in range(losses) for act in (said(at), PeerLost("gone"))]
    record = SessionRecord("s", REQUEST, model="f")
    session = await stage.play(record, *acts, said(losses, last=True))
    assert session.error is None
    assert record.tokens == [7] * (losses + 1)
    assert session.stats.failovers == losses
    assert stage.resumed == [False] + [True] * losses


async def test_a_session_that_gets_no_token_gives_up(stage: Stage) -> None:
    session = await stage.play(SessionRecord("s", REQUEST, model="f"), *[PeerLost("gone")] * 99)
    assert isinstance(session.error, PeerLost)
    assert len(stage.visited) == MAX_FRUITLESS + 1


async def test_a_session_without_a_verifier_has_lost_none(stage: Stage) -> None:
    for name in "12":
        await stage.manager.worker_pool.workers.drop(name)
    session = await stage.play(SessionRecord("s", REQUEST, model="f"))
    assert isinstance(session.error, NoVerifier)
    assert session.stats.failovers == 0
    assert stage.manager.metrics.registry.get_sample_value("outrider_failovers_total", {"model_name": "m"}) == 0


async def test_a_session_opens_no_verifier_whose_target_has_other_end_tokens(stage: Stage) -> None:
    for verifier in stage.manager.worker_pool.connections():
        verifier.info = replace(verifier.info, model=replace(TARGET.info, eos_token_ids=(2, 7)))
    session = await stage.play(SessionRecord("s", REQUEST, model="f"))
    assert isinstance(session.error, NoVerifier)
    assert not stage.visited, "for which it would be shunned by all"


async def test_a_full_verifier_ends_only_what_has_not_begun(stage: Stage) -> None:
    full = Overloaded("full", retry_after_ms=1)
    session = await stage.play(SessionRecord("s", REQUEST, model="f"), full, full)
    assert session.error is full
    assert sorted(stage.visited) == ["1", "2"], "each was asked"
    record = SessionRecord("t", REQUEST, model="f")
    session = await stage.play(record, said(0), PeerLost("gone"), full, full, full, said(1, last=True))
    assert session.error is None
    assert record.tokens == [7, 7]


@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_session_leaves_a_draining_verifier_for_one_where_it_would_run_at_once(
    stage: Stage, waiting: int
) -> None:
    """Elsewhere its client would wait in the middle of a text."""
    first, second = stage.manager.worker_pool.connections()
    second.info = replace(second.info, load=WorkerLoad(waiting=waiting))

    stage.acts, record = drained_after_a_token(first), SessionRecord("s", REQUEST, model="f", verifier="1")
    await Session(record, TARGET, stage.manager._context).run()
    assert record.tokens == [7, 7, 7]
    assert stage.visited == (["1"] if waiting else ["1", "2"])


@pytest.mark.parametrize(("capacity", "leave"), [(64, 2), (6, 1)], ids=["as cache is free", "as seats are free"])
async def test_no_more_sessions_leave_a_draining_verifier_than_the_other_has_room_for(
    stage: Stage, capacity: int, leave: int
) -> None:
    """Verdicts of one step reach all of them before the other verifier can report the first that came."""
    first, second = stage.manager.worker_pool.connections()
    needed = len(REQUEST.prompt) + REQUEST.params.max_tokens + _EXTRA_TOKENS
    load = WorkerLoad(sessions=5, kv_tokens_used=1000, kv_tokens_total=1000 + 3 * needed - 1)
    second.info = replace(second.info, capacity=capacity, load=load)
    for index in range(5):
        first.info = replace(first.info, draining=False)
        stage.acts, record = drained_after_a_token(first), SessionRecord(f"s{index}", REQUEST, model="f", verifier="1")
        await Session(record, TARGET, stage.manager._context).run()
        assert record.tokens == [7, 7, 7]
    assert stage.visited.count("2") == leave


async def test_a_session_that_leaves_a_draining_verifier_keeps_its_seat(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seats are counted of the others only, which have fewer than all sessions that run: it would wait for one."""
    first, second = stage.manager.worker_pool.connections()
    first.info, second.info = (replace(each.info, capacity=4) for each in (first, second))
    seats = stage.manager._context.seats("f")
    monkeypatch.setattr(seats, "_several", lambda: True)

    stage.acts, record = drained_after_a_token(first), SessionRecord("s", REQUEST, model="f", verifier="1")
    async with AsyncExitStack() as others:
        for tenant in "ABCD":
            await others.enter_async_context(seats.taken(tenant, 1, resumed=False))
        async with asyncio.timeout(5):
            await Session(record, TARGET, stage.manager._context).run()
    assert stage.visited == ["1", "2"]


async def test_full_verifiers_are_not_asked_without_an_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow network, the rest of one is over before the next one has refused."""
    monkeypatch.setattr(WorkerConnection, "record_full", lambda connection: None)
    full = Overloaded("full", retry_after_ms=1)
    session = await stage.play(SessionRecord("s", REQUEST, model="f"), *[full] * 99)
    assert session.error is full
    assert len(stage.visited) == MAX_FRUITLESS + 1


@pytest.mark.parametrize("name", ["1", "2"])
async def test_a_session_goes_on_where_its_prefix_is_cached(stage: Stage, name: str) -> None:
    await stage.play(SessionRecord("s", REQUEST, model="f", verifier=name), said(0, last=True))
    assert stage.visited == [name]


async def test_an_answer_on_which_the_tokenizer_panics_does_not_look_complete(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As the errors of libraries in Rust."""

    def decode(*_: object) -> str:
        raise Panic

    monkeypatch.setattr(TextStream, "add", decode)
    session = await stage.play(SessionRecord("s", REQUEST, model="f"), said(0))
    assert session.error is not None
    assert (session.error.code, session.ended) == ("internal", True)


async def test_guesses_after_a_stop_string_are_not_counted(stage: Stage) -> None:
    params = replace(REQUEST.params, stop=("bc",))
    record = SessionRecord("s", replace(REQUEST, params=params), model="f")
    tallies = (SourceTally(1, 4, 4), SourceTally(2, 1, 1))
    act = Verdict(2, spelt("abcde"), 4, TokenKind.BONUS, proposed=4, nodes=4, sources=tallies)
    session = Session(record, TARGET, stage.manager._context)
    for source, kind in ((1, "model"), (2, "ngram")):
        session.stats.record_drafter(source, kind)
    stage.acts = iter((act,))
    await session.run()
    assert tuple(record.tokens) == spelt("abc")
    assert record.finish_reason is FinishReason.STOP
    stats = session.stats.values()
    assert (stats.accepted_tokens, stats.acceptance_length) == (3, 3.0)
    assert [each.accepted for each in stats.drafters] == [3, 1]


@pytest.mark.parametrize(
    ("error", "abandoned"), [(Fenced("epoch 2"), 1), (Overloaded("full"), 0)], ids=lambda value: type(value).__name__
)
async def test_a_session_that_another_coordinator_continues_has_not_failed(
    stage: Stage, error: OutriderError, abandoned: int
) -> None:
    """It is counted where it ends."""
    stage.acts = iter([said(0), error, error])
    session = Session(SessionRecord("s", REQUEST), TARGET, stage.manager._context)
    session.start()
    await session.closed()
    assert session.error is not None
    await asyncio.sleep(0)
    assert _ended(stage, session.error.code) == (abandoned, 1 - abandoned)


async def test_a_session_that_a_shutdown_stops_has_not_failed(stage: Stage) -> None:
    session = stage.manager._run(Session(SessionRecord("s", REQUEST), TARGET, stage.manager._context))
    reached = asyncio.Event()

    async def wait(*_: object, **__: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    stage.manager.worker_pool.wait_for = wait  # type: ignore[method-assign,assignment]
    await asyncio.wait_for(reached.wait(), 5)
    await stage.manager.stop()
    assert session.error is not None
    assert _ended(stage, session.error.code) == (1, 0)


@pytest.mark.parametrize("fenced", [False, True])
async def test_an_answer_that_has_ended_is_not_taken_from_who_reads_it(stage: Stage, *, fenced: bool) -> None:
    """By the end of its coordinator, or by a retry at another one before its end was written."""
    session = await stage.play(SessionRecord("s", REQUEST, model="f"), said(0, last=True))
    with stage.manager.followed(session):
        stage.manager._sessions["s"] = session
        session._entry.on_fenced(False) if fenced else await stage.manager.stop()
        assert session.error is None
        assert session.record.finished


@pytest.mark.parametrize("mode", [Verification.COUPLED, Verification.REJECTION])
async def test_a_session_that_is_stopped_at_any_await_fails_unless_it_has_finished(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, mode: Verification
) -> None:
    """It has its end while its streams are closed. Where tokens are drawn once, the end must be stored first."""

    async def closes(self: ScriptedStream, *_: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(ScriptedStream, "__aexit__", closes)
    request, outcomes = replace(REQUEST, params=replace(REQUEST.params, temperature=1.0, verification=mode)), set()
    for awaits in range(40):
        stage.acts = iter((said(0), said(1, last=True)))
        session = Session(SessionRecord(f"s{awaits}", request, model="f"), TARGET, stage.manager._context)
        session.start()
        for _ in range(awaits):
            await asyncio.sleep(0)
        ended = session.ended
        session.stop(Unavailable("this coordinator is shutting down"))
        await session.closed()
        outcomes.add((ended, session.record.finished, session.error is None))
    undecided = (False, True, mode is Verification.COUPLED)
    assert outcomes == {(False, False, False), undecided, (True, True, True)}


async def test_a_session_that_is_stopped_at_any_await_leaves_its_seat(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = stage.manager._context.seats("f")
    monkeypatch.setattr(seats, "_several", lambda: True)
    records = []
    for awaits in range(40):
        stage.acts = iter((said(0), PeerLost("gone"), said(1, last=True)))
        session = Session(SessionRecord(f"s{awaits}", REQUEST, model="f"), TARGET, stage.manager._context)
        session.start()
        for _ in range(awaits):
            await asyncio.sleep(0)
        session.stop()
        await session.closed()
        records.append(session.record)
        assert not seats._tenants, f"after {awaits}"
        assert not seats._queues, f"after {awaits}"
    assert not records[0].tokens
    assert {len(record.tokens) for record in records} == {0, 1, 2}
    assert records[-1].finished


@pytest.mark.parametrize("how", ["finished", "failed", "left"])
async def test_what_is_over_is_gone_without_a_garbage_collection(stage: Stage, how: str) -> None:
    """Collections are rare in a service, and the longer the more there is: sessions with their outputs piled up."""
    stage.acts = iter((said(0, last=True),) if how == "finished" else ())  # without any, its verifiers are lost
    gc.collect()
    gc.disable()
    try:
        session = Session(SessionRecord("s", REQUEST, model="f"), TARGET, stage.manager._context)
        session.start()
        if how == "left":
            await asyncio.sleep(0)
            session.stop()
        await session.closed()
        assert (session.record.finished, session.error is None) == (how == "finished", how != "failed")
        over = weakref.ref(session)
        del session
        await asyncio.sleep(0)
        assert over() is None
    finally:
        gc.enable()


def _ended(stage: Stage, code: str) -> tuple[float | None, float | None]:
    """Return how many requests were abandoned, and how many have failed with this code."""
    value = stage.manager.metrics.registry.get_sample_value
    abandoned = value("outrider_request_success_total", {"model_name": "m", "finished_reason": "abandoned"})
    return abandoned, value("outrider_requests_failed_total", {"model_name": "m", "code": code})
