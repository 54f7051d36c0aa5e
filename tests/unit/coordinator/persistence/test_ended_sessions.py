"""Which record continues a session that ended here: the stored one, or what this coordinator kept of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from coordinator.persistence.ended_sessions import EndedSessions
from coordinator.persistence.redis_connection import StoreDown
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.persistence.store import Store
from coordinator.persistence.stored_records import Unreadable
from outrider.protocol.errors import NotFound
from outrider.protocol.sampling_params import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, Grammar, SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind

NONE, CANCELLED = FinishReason.NONE, FinishReason.CANCELLED


class Claims:
    """A store that answers one claim after the other: with a record, with none, or not at all."""

    def __init__(self, *answers: SessionRecord | StoreDown | Unreadable | None) -> None:
        self._answers = list(answers)

    async def claim(self, session_id: str, tenant: str) -> SessionRecord | None:
        assert (session_id, tenant) == ("s", "")
        answer = self._answers.pop(0)
        if isinstance(answer, StoreDown | Unreadable):
            raise answer
        return answer


def record_of(num_tokens: int, epoch: int, finish: FinishReason = NONE) -> SessionRecord:
    request = SessionRequest((1, 2), SamplingParams(seed=1, max_tokens=100))
    tokens, kinds = list(range(num_tokens)), [TokenKind.PLAIN] * num_tokens
    return SessionRecord("s", request, epoch=epoch, tokens=tokens, kinds=kinds, finish_reason=finish)


def ended(kept: SessionRecord | None, *answers: SessionRecord | StoreDown | Unreadable | None) -> EndedSessions:
    sessions = EndedSessions(cast(Store, cast(Any, Claims(*answers))))
    if kept is not None:
        sessions.keep(kept)
    return sessions


async def load(sessions: EndedSessions) -> tuple[int, int, FinishReason, bool]:
    """Return the loaded record's number of tokens, epoch and end, and whether it is stored as finished."""
    record, stored_as_finished = await sessions.load("s")
    return len(record.tokens), record.epoch, record.finish_reason, stored_as_finished


async def test_a_session_cancelled_at_another_coordinator_stays_cancelled() -> None:
    """It had not received the last five tokens. Continued from the kept record, each write would be fenced."""
    sessions = ended(record_of(85, epoch=1), record_of(80, 2, CANCELLED))
    assert await load(sessions) == (80, 2, CANCELLED, True)


async def test_a_session_that_another_coordinator_has_owned_since_continues_as_that_one_left_it() -> None:
    sessions = ended(record_of(85, epoch=1), record_of(83, 3), record_of(83, 4))
    assert await load(sessions) == (83, 3, NONE, False)
    assert await load(sessions) == (83, 4, NONE, False), "nor does the kept record win later"


async def test_tokens_that_the_store_lacks_are_kept_through_every_claim_of_this_coordinator() -> None:
    """The first load may have come to nothing: its request had a wrong position, or there was no verifier."""
    sessions = ended(record_of(85, epoch=1), record_of(80, 2), record_of(80, 3))
    assert await load(sessions) == (85, 2, NONE, False)
    assert await load(sessions) == (85, 3, NONE, False)


async def test_an_end_that_the_store_lacks_is_kept() -> None:
    sessions = ended(record_of(85, 1, CANCELLED), record_of(85, 2))
    assert await load(sessions) == (85, 2, CANCELLED, False), "it is yet to be stored"


async def test_without_a_stored_record_the_kept_one_continues_beyond_what_another_coordinator_had() -> None:
    """Redis has lost who owned it last. Verifiers know, and would take this coordinator for one that was fenced."""
    other, here = ended(record_of(90, epoch=2), record_of(85, 4)), ended(record_of(85, epoch=1), None, record_of(80, 4))
    assert await load(here) == (85, 3, NONE, False)
    assert await load(other) == (85, 4, NONE, False), "nor does it take what it had for the newest"
    assert await load(here) == (85, 4, NONE, False), "here it is, as after any claim"


async def test_an_end_that_the_store_has_lost_is_as_it_was() -> None:
    sessions = ended(record_of(85, 1, FinishReason.STOP), None)
    assert await load(sessions) == (85, 1, FinishReason.STOP, False), "it is yet to be stored again"


async def test_an_end_that_the_store_has_lost_is_yet_to_be_stored_again() -> None:
    ends = FinishReason.LENGTH
    assert await load(ended(record_of(85, 1, ends), None)) == (85, 1, ends, False)
    assert await load(ended(record_of(85, 1, ends), record_of(85, 1, ends))) == (85, 1, ends, True)


async def test_where_the_stored_record_is_damaged_the_kept_one_continues_and_replaces_it() -> None:
    """The claim may have counted before the record was read."""
    assert await load(ended(record_of(85, 1, CANCELLED), Unreadable("it"))) == (85, 2, CANCELLED, False)
    with pytest.raises(Unreadable):
        await load(ended(None, Unreadable("it")))


async def test_a_claim_without_an_answer_may_have_counted() -> None:
    """Redis executes it when it runs again: a write with the epoch of before would be fenced off by ourselves."""
    away = StoreDown("away")
    sessions = ended(record_of(85, epoch=1), away, away, record_of(80, 2))
    assert await load(sessions) == (85, 2, NONE, False)
    assert await load(sessions) == (85, 2, NONE, False), "another coordinator may own the next one"
    assert await load(sessions) == (85, 2, NONE, False), "it had not counted"


async def test_an_epoch_that_was_guessed_is_no_claim() -> None:
    """Another coordinator owned the session while this one could not reach Redis."""
    sessions = ended(record_of(85, epoch=1), StoreDown("away"), record_of(20, 3))
    assert await load(sessions) == (85, 2, NONE, False)
    assert await load(sessions) == (20, 3, NONE, False)


async def test_an_end_is_stored_with_the_epoch_that_was_guessed() -> None:
    """A write of before would be fenced off by the claim, and the end be lost."""
    sessions = ended(record_of(85, 1, CANCELLED), StoreDown("away"))
    assert await load(sessions) == (85, 2, CANCELLED, False), "it is yet to be stored"


async def test_a_store_that_lost_writes_does_not_lower_the_epoch() -> None:
    """Otherwise workers would take the session for an older one, also where another coordinator had it meanwhile."""
    sessions = ended(record_of(85, epoch=5), record_of(60, 2), record_of(60, 8), record_of(60, 10))
    assert await load(sessions) == (85, 7, NONE, False)
    assert await load(sessions) == (85, 8, NONE, False), "what is written with that epoch is claimed as usual"
    assert await load(sessions) == (60, 10, NONE, False)


async def test_a_session_that_was_never_here_is_the_stores() -> None:
    assert await load(ended(None, record_of(80, 2))) == (80, 2, NONE, False)
    with pytest.raises(NotFound, match="no session"):
        await load(ended(None, None))
    with pytest.raises(StoreDown):
        await load(ended(None, StoreDown("away")))


def test_what_is_kept_is_bounded_by_size() -> None:
    sessions = ended(None)
    for number in range(50):
        request = SessionRequest(tuple(range(100_000)), SamplingParams(seed=1, max_tokens=100))
        sessions.keep(SessionRecord(f"long-{number}", request))
    assert list(sessions.recent) == [f"long-{number}" for number in range(31, 50)], "the newest ones"
    for number in range(1_000):
        sessions.keep(replace(record_of(100, epoch=1), session_id=f"usual-{number}"))
    assert {f"usual-{number}" for number in range(1_000)} <= sessions.recent.keys()


def test_large_parameters_count_as_what_is_kept() -> None:
    """A short answer to a request with a grammar and a bias for each token keeps both."""
    grammar, biases = Grammar(regex="a" * MAX_GRAMMAR_BYTES), dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    request = SessionRequest((1, 2), SamplingParams(seed=1, logit_bias=biases, grammar=grammar, stop=("x" * 500,) * 16))
    sessions = EndedSessions(cast(Store, None))
    for number in range(1_000):
        sessions.keep(SessionRecord(f"large-{number}", request))
    most_bytes = MAX_GRAMMAR_BYTES + 100 * MAX_LOGIT_BIAS + 16 * 500
    assert 50 < len(sessions.recent) < 100_000_000 // most_bytes
    assert list(sessions.recent) == [f"large-{number}" for number in range(1_000 - len(sessions.recent), 1_000)]


async def test_what_another_tenant_had_here_is_not_there_with_or_without_redis() -> None:
    sessions = ended(replace(record_of(4, 1, FinishReason.LENGTH), tenant="another"), None, StoreDown("away"))
    with pytest.raises(NotFound):
        await sessions.load("s")
    with pytest.raises(StoreDown):
        await sessions.load("s")
