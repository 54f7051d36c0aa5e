"""Requests for one session that come at once: all follow the same one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from coordinator.admission.waiting.urgency import set_urgency
from coordinator.api.service import CoordinatorService
from coordinator.persistence import ended_sessions
from coordinator.persistence.ended_sessions import EndedSessions
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.persistence.store import Store
from coordinator.sessions import session_manager
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import follow
from coordinator.sessions.session import Session
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target
from outrider.protocol.errors import Conflict, Expired, InvalidRequest, NotFound, Overloaded, Unavailable
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer

NOTHING: Any = None
TARGET = Target(ModelInfo("m", "f", vocab_size=100), byte_tokenizer(), NOTHING, NOTHING, identity="m f")
REQUEST = SessionRequest((1, 2), SamplingParams(seed=1, max_tokens=8))


class SlowClaims:
    """A store that counts the epoch on with each claim and answers a little later."""

    def __init__(self, *stored: str) -> None:
        self.epochs = dict.fromkeys(stored, 1)  # by session
        self.requests = dict.fromkeys(stored, REQUEST)
        self.pending = self.most_pending = 0

    async def claim(self, session_id: str, tenant: str) -> SessionRecord | None:
        record = None
        if session_id in self.epochs:
            self.epochs[session_id] += 1
            epoch, request = self.epochs[session_id], self.requests[session_id]
            record = SessionRecord(session_id, request, epoch=epoch, model=TARGET.identity)
        self.pending += 1
        self.most_pending = max(self.most_pending, self.pending)
        await asyncio.sleep(0.01)
        self.pending -= 1
        return record

    async def cancel(self, session_id: str, tenant: str) -> bool:
        """Cancel a session whose end was not written yet: its coordinator would be fenced off."""
        return True


class Requests:
    """The requests of a coordinator whose sessions do not run."""

    def __init__(self, manager: SessionManager) -> None:
        self.manager = manager
        self.stored = SlowClaims()

    def store(self, *sessions: str) -> None:
        self.stored = SlowClaims(*sessions)
        self.manager.ended = EndedSessions(cast(Store, cast(Any, self.stored)))

    async def resume(self, *sessions: str, position: int = 0) -> list[Session]:
        return await asyncio.gather(*(self.manager.take_over(each, position, ()) for each in sessions))

    async def find(self, session_id: str, target: Target = TARGET) -> Session:
        record = SessionRecord(session_id, REQUEST, model=target.identity)
        return await self.manager._find_by_key(record, target, admitted=True)


@pytest.fixture
async def requests(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Requests]:
    monkeypatch.setattr(Session, "start", lambda session: None)
    monkeypatch.setattr(session_manager, "_FIND_WAIT_S", 0.001)
    manager = SessionManager(CoordinatorSettings(), "redis://127.0.0.1:1", FleetKeys(), lambda: False)
    manager.targets.add(TARGET, lambda identity: ())
    yield Requests(manager)
    await manager.stop()


async def test_of_two_that_resume_a_session_at_once_one_claims_it(requests: Requests) -> None:
    """A second claim would fence the session that runs by the first one."""
    requests.store("s")
    one, other = await requests.resume("s", "s")
    assert one is other
    assert one.record.epoch == requests.stored.epochs["s"] == 2
    assert requests.manager.live == [one]
    assert not requests.manager._claiming, "what they waited for is forgotten"


async def test_sessions_are_resumed_beside_each_other(requests: Requests) -> None:
    requests.store("s", "t")
    one, other = await requests.resume("s", "t")
    assert (one.record.session_id, other.record.session_id) == ("s", "t")
    assert requests.stored.epochs == {"s": 2, "t": 2}
    assert requests.stored.most_pending == 2, "no session waits for another one"


async def test_a_session_is_resumed_in_the_class_of_its_request(requests: Requests) -> None:
    """`Resume` names none: of a coordinator that had failed, requests of any class came back in that of their key."""
    set_urgency(7, None)
    stored = (await requests.manager.begin(REQUEST, TARGET, "key")).record.request.to_json()
    set_urgency(None, None)
    requests.store("s", "before")
    requests.stored.requests["s"] = SessionRequest.from_json(stored)
    resumed, other = await requests.resume("s", "before")
    assert (resumed.urgency.priority, other.urgency.priority) == (7, 0)
    same = await requests.manager.begin(REQUEST, TARGET, "key")
    assert same.urgency.priority == 7, "a class is no part of what its idempotency key stands for"


async def test_a_request_that_fails_leaves_the_session_to_the_next_one(requests: Requests) -> None:
    requests.store("s")
    with pytest.raises(InvalidRequest, match="from_position"):
        await requests.resume("s", position=9)
    (session,) = await requests.resume("s")
    assert session.record.epoch == requests.stored.epochs["s"]
    with pytest.raises(NotFound):
        await requests.resume("unknown")


async def test_two_of_one_idempotency_key_start_its_session_once(requests: Requests) -> None:
    """The coordinator that reserved the key failed before it stored the session."""
    requests.store()
    one, other = await asyncio.gather(requests.find("s"), requests.find("s"))
    assert one is other
    assert requests.manager.live == [one]


@pytest.mark.parametrize("stops", [False, True], ids=["its other reader leaves", "the coordinator stops"])
async def test_a_session_that_is_stopped_before_it_began_is_not_begun(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, *, stops: bool
) -> None:
    """While its idempotency key is being reserved; it ran without a reader, and its answer was empty."""
    manager = requests.manager
    requests.store()

    async def reserve(key: str, session_id: str, request: SessionRequest) -> str:
        (session,) = await requests.resume(session_id)
        if stops:
            manager.drain()
            session.stop(Unavailable("this coordinator is shutting down"))
        else:
            with manager.followed(session):
                pass
        return session_id

    monkeypatch.setattr(manager._keys, "reserve", reserve)
    if stops:
        with pytest.raises(Unavailable):
            await manager.begin(REQUEST, TARGET, "key")
        return
    begun = await manager.begin(REQUEST, TARGET, "key")
    assert not begun.ended
    assert manager.live == [begun]


@pytest.mark.parametrize("told", [False, True], ids=["its end is being written", "its end is being read"])
async def test_a_session_that_has_just_ended_is_not_cancelled_in_redis(requests: Requests, *, told: bool) -> None:
    requests.store("s")
    (session,) = await requests.resume("s")
    session.record.append([5] * 8, [TokenKind.PLAIN] * 8, ())
    session.record.finish_reason = FinishReason.LENGTH
    if told:
        session._end()
    with requests.manager.followed(session):
        assert not await requests.manager.cancel("s")
        assert session.record.finish_reason is FinishReason.LENGTH


async def test_a_late_reader_brings_no_older_record_back(requests: Requests) -> None:
    """Without Redis the session would go on from it."""
    requests.store("s")
    (failed,) = await requests.resume("s")
    with requests.manager.followed(failed):
        failed.stop(Unavailable("no verifier"))
        (resumed,) = await requests.resume("s")
        resumed.record.append([5] * 8, [TokenKind.PLAIN] * 8, ())
        resumed.record.finish_reason = FinishReason.LENGTH
        resumed._end()
        with requests.manager.followed(resumed):
            pass
    assert requests.manager.ended.recent["s"] is resumed.record


async def test_each_reader_of_a_waiting_session_has_its_own_deadline(requests: Requests) -> None:
    """Such as a repeated request that joins the first one."""
    requests.store("s")
    (session,) = await requests.resume("s")

    async def read(timeout_s: float | None) -> None:
        set_urgency(None, timeout_s)
        with requests.manager.followed(session):
            async for _ in follow([session.output]):
                pass

    first = asyncio.create_task(read(None))
    with pytest.raises(Expired):
        await asyncio.create_task(read(0.02))
    assert not session.ended
    last = asyncio.create_task(read(0.02))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(Expired) as late:
        await last
    assert session.error is late.value
    assert not requests.manager.live


async def test_a_long_output_that_is_read_at_once_lets_others_go_on(requests: Requests) -> None:
    """With 20 log probabilities for each token, 4,096 of them took half a second of the event loop."""
    requests.store("s")
    (session,) = await requests.resume("s")
    session.output.append([5] * 1000, [TokenKind.PLAIN] * 1000)
    session.output.end(finished=True)
    read, turns = [], []

    async def others() -> None:
        while True:
            turns.append(len(read))
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    async for _, _, tokens in follow([session.output]):
        read += tokens
    beside.cancel()
    assert len(read) == 1000
    assert max(after - before for before, after in pairwise([0, *turns, 1000])) <= 64


@pytest.mark.parametrize("finished", [False, True])
async def test_the_text_of_a_session_that_is_resumed_is_not_made_in_the_event_loop(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, *, finished: bool
) -> None:
    """100,000 tokens took half a second there, each time that a client asked for them."""
    add, threads = TextStream.add, set[threading.Thread]()

    def watched(stream: TextStream, token: int) -> Any:
        threads.add(threading.current_thread())
        return add(stream, token)

    monkeypatch.setattr(TextStream, "add", watched)
    requests.store("s")
    asked = replace(REQUEST, params=replace(REQUEST.params, stop=("no",), max_tokens=5_000))
    reason = FinishReason.LENGTH if finished else FinishReason.NONE
    known = SessionRecord("s", asked, model=TARGET.identity, epoch=2, finish_reason=reason)
    known.append([5] * 4_000, [TokenKind.PLAIN] * 4_000, ())
    requests.manager.ended.keep(known)
    (session,) = await requests.resume("s")
    assert [token.token for token in session.output.tokens] == [5] * 4_000
    assert threads
    assert threading.main_thread() not in threads


async def test_resumed_sessions_count_for_their_key(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to twice its limit, since those of a failed coordinator come on top of its own."""
    monkeypatch.setattr(requests.manager._quotas, "_settings", CoordinatorSettings(default_max_sessions=1))
    requests.store("s", "t", "u")
    await requests.resume("s")
    await requests.resume("t")
    with pytest.raises(Unavailable):
        await requests.resume("u")


async def test_a_session_whose_end_is_not_stored_yet_is_written_again_and_not_counted_again(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a retry of an idempotency key right after the end."""
    started: list[Session] = []
    monkeypatch.setattr(Session, "start", started.append)
    requests.store("s")
    ended = SessionRecord("s", REQUEST, model=TARGET.identity, epoch=2, finish_reason=FinishReason.LENGTH)
    ended.append([5] * 8, [TokenKind.PLAIN] * 8, ())
    requests.manager.ended.keep(ended)
    changed: list[object] = []
    monkeypatch.setattr(requests.manager.write_behind, "mark_changed", lambda entry: changed.append(entry.record))
    (session,) = await requests.resume("s")
    assert session.ended
    assert [token.token for token in session.output.tokens] == [5] * 8
    assert changed == [session.record]
    assert not started
    assert not requests.manager.live


async def test_a_choice_that_has_ended_before_the_others_is_found_without_redis(requests: Requests) -> None:
    """A retry of a request with several choices, while one is being written."""
    requests.store("s", "t")
    ended, running = await requests.resume("s", "t")
    ended.record.append([5] * 8, [TokenKind.PLAIN] * 8, ())
    ended.record.finish_reason = FinishReason.LENGTH
    ended.output.end(finished=True)
    running.output.end(finished=False)  # lost: its record says how to go on
    requests.store()
    assert await requests.resume("s") == [ended]
    with pytest.raises(NotFound):
        await requests.resume("t")


async def test_a_used_idempotency_key_leaves_no_session_of_its_own(requests: Requests) -> None:
    """It would never end, so it would take one of its API key's places for ever."""
    first = await requests.manager.begin(REQUEST, TARGET, "key")
    with pytest.raises(Conflict):
        await requests.manager.begin(replace(REQUEST, prompt=(3,)), TARGET, "key")
    assert await requests.manager.begin(REQUEST, TARGET, "key") is first
    assert requests.manager.live == [first]


async def test_a_key_of_another_model_leaves_its_session_as_it_was(requests: Requests) -> None:
    """Claimed to tell its model, it ran to its end without a reader, and delayed its coordinator's shutdown."""
    requests.store("s")
    other = replace(TARGET, identity="another")
    with pytest.raises(Conflict, match="another model"):
        await requests.find("s", other)
    assert not requests.manager.live
    session = await requests.find("s")
    with requests.manager.followed(session):
        with pytest.raises(Conflict, match="another model"):
            await requests.find("s", other)
        assert not session.ended, "it has a reader"


async def test_an_answer_that_has_ended_takes_no_place_while_it_is_read(requests: Requests) -> None:
    requests.store("s", "t")
    ended, _ = await requests.resume("s", "t")
    assert requests.manager._held() == (2, 2)
    ended.record.finish_reason = FinishReason.LENGTH
    ended.output.end(finished=True)
    assert requests.manager._held() == (1, 1)


async def test_a_repeated_idempotency_key_is_answered_whatever_the_limits_say(requests: Requests) -> None:
    """A client that repeats after a timeout found its own first request in the way."""
    first = await requests.manager.begin(REQUEST, TARGET, "key")
    with patch.object(requests.manager, "admit", side_effect=Overloaded("full", retry_after_ms=1)):
        assert await requests.manager.begin(REQUEST, TARGET, "key") is first
        with pytest.raises(Overloaded):
            await requests.manager.begin(REQUEST, TARGET, "another")


async def test_a_retry_does_not_wait_for_a_request_that_was_cancelled_before_it_began(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has reserved the key, and its answer to the first request is late."""
    reserved: list[str] = []

    async def reserve(key: str, session_id: str, request: SessionRequest) -> str:
        reserved.append(session_id)
        if len(reserved) == 1:
            await asyncio.Event().wait()
        return reserved[0]

    monkeypatch.setattr(requests.manager._keys, "reserve", reserve)
    first = asyncio.create_task(requests.manager.begin(REQUEST, TARGET, "key"))
    await asyncio.sleep(0)
    followed = await requests.manager.begin(REQUEST, TARGET, "key")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert followed.ended, "else it is followed for ever"
    assert isinstance(followed.error, Unavailable)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(("position", "tail"), [(4, (5, 5, 7, 7)), (4, ()), (2, (5, 7))])
async def test_a_client_with_another_text_is_not_given_the_rest_of_this_one(
    requests: Requests, position: int, tail: tuple[int, ...], ended: bool
) -> None:
    """In rejection mode: its coordinator was taken over from, and another client had the session continued."""
    params = replace(REQUEST.params, verification=Verification.REJECTION)
    record = SessionRecord("s", replace(REQUEST, params=params), model=TARGET.identity, epoch=2)
    record.append([5] * 2, [TokenKind.PLAIN] * 2, ())
    if ended:
        requests.store()
        record.finish_reason = FinishReason.STOP
        requests.manager.ended.keep(record)
    else:
        requests.manager._run(Session(record, TARGET, requests.manager._context))
    with pytest.raises(Conflict if position == 2 or not ended else InvalidRequest) as refused:
        await requests.manager.take_over("s", position, tail)
    assert refused.value.field == ("tail" if position == 2 else "from_position")
    session = await requests.manager.take_over("s", 2, (5, 5))
    assert session.record.tokens == [5, 5]


async def test_a_tail_that_is_too_long_is_not_read(requests: Requests) -> None:
    """Four million ids, which a message can have, took 70 ms in which all streams waited."""

    class Tail:
        def __len__(self) -> int:
            return 4_000_000

    context: Any = SimpleNamespace(set_trailing_metadata=list, invocation_metadata=tuple, code=int)
    record = SessionRecord("s", replace(REQUEST, params=replace(REQUEST.params, verification=Verification.REJECTION)))
    requests.manager._run(Session(record, TARGET, requests.manager._context))
    service: Any = SimpleNamespace(sessions=requests.manager)
    asked: Any = SimpleNamespace(session_id="s", from_position=4, tail=Tail())
    with pytest.raises(InvalidRequest, match="tail is 4000000 tokens, must be at most 4"):
        await anext(CoordinatorService.Resume(service, asked, context))


async def test_an_end_that_another_coordinator_could_not_write_waits_for_redis(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SessionRecord("s", REQUEST, model=TARGET.identity, finish_reason=FinishReason.STOP)

    async def load(session_id: str) -> tuple[SessionRecord, bool]:
        return record, False

    monkeypatch.setattr(requests.manager.ended, "load", load)
    await requests.manager.take_over("s", 0, ())
    await requests.manager.write_behind._write_batch()
    assert requests.manager.write_behind.unwritten == 1


async def test_without_redis_what_waits_for_it_is_bounded(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended sessions wait for Redis as long as they are remembered; those that run, whatever their number."""
    monkeypatch.setattr(ended_sessions, "_REMEMBERED", 10_000)
    manager = requests.manager
    running = [Session(SessionRecord(f"runs-{number}", REQUEST), TARGET, manager._context) for number in range(50)]
    for session in running:
        manager._run(session)
        session.store()
    for number in range(200):
        session = Session(SessionRecord(f"ended-{number}", REQUEST), TARGET, manager._context)
        with manager.followed(session):
            session.store()
    assert len(manager.ended.recent) < 20
    assert manager.write_behind.unwritten == 250
    await manager.write_behind._write_batch()
    assert manager.write_behind.unwritten == len(manager.ended.recent) + len(running)
