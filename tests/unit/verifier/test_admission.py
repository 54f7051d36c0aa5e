"""Admission: which sessions run, wait or are refused, and what of the cache they take and give back."""

from __future__ import annotations

import pytest

from outrider.engine.mock import MockEngine
from outrider.observability.metrics import VerifierMetrics
from outrider.protocol.errors import Fenced, InvalidRequest, Overloaded, PeerLost
from outrider.protocol.sampling_params import SamplingParams
from outrider.settings.verifier import VerifierSettings
from verifier import admission
from verifier.admission import EPOCH_KEPT_S, Admission
from verifier.engine_target import EngineTarget
from verifier.session import Ended, VerifyOpening, VerifySession

LIMITS = VerifierSettings(
    max_sessions=2, max_waiting=1, kv_tokens=160, prefill_rows=64, prefill_stretch=1.5, guess_rows=8
)


class CountingTarget(EngineTarget):
    """A target that notes whose cache it has freed."""

    def __init__(self) -> None:
        super().__init__(MockEngine())
        self.freed: list[str] = []

    def free(self, session: VerifySession) -> None:
        self.freed.append(session.id)


def made(limits: VerifierSettings = LIMITS) -> tuple[Admission, CountingTarget]:
    target = CountingTarget()
    return Admission(target, limits, VerifierMetrics("mock")), target


def opening(name: str, epoch: int = 1, max_tokens: int = 50) -> VerifyOpening:
    """Of three prompt tokens: with 8 guesses and 50 output tokens it needs two blocks."""
    return VerifyOpening(name, epoch, (1, 2, 3), 3, SamplingParams(seed=1, temperature=0.0, max_tokens=max_tokens))


def test_what_a_session_has_reserved_is_for_the_next_one_once_it_has_ended() -> None:
    admitted, target = made()
    first, second = admitted.open(opening("a")), admitted.open(opening("b"))
    assert admitted.reserved_tokens == 128
    third = admitted.open(opening("c"))
    assert list(admitted.waiting) == [third]
    admitted.close(first)
    admitted.close(first)
    admitted.admit_waiting()
    assert list(admitted.running.values()) == [second, third]
    assert admitted.reserved_tokens == 128
    assert target.freed == [], "a step may be computing it"
    for _ in range(2):
        admitted.free_closed()
    assert target.freed == ["a"], "once"
    admitted.close(second)
    admitted.close(third)
    assert admitted.reserved_tokens == 0


def test_a_session_reserves_room_for_the_guesses_of_its_last_step() -> None:
    admitted, _ = made()
    admitted.open(opening("a", max_tokens=64 - 3 - 8))
    assert admitted.reserved_tokens == 64
    admitted.open(opening("b", max_tokens=64 - 3 - 7))
    assert admitted.reserved_tokens == 64 + 96


def test_one_that_waits_and_ends_has_no_cache_to_free() -> None:
    admitted, target = made()
    *_, waiting = (admitted.open(opening(name)) for name in "abc")
    admitted.close(waiting)
    admitted.free_closed()
    assert not admitted.waiting
    assert target.freed == []


def test_beyond_those_that_run_and_wait_a_session_is_refused() -> None:
    admitted, _ = made()
    for name in "abc":
        admitted.open(opening(name))
    with pytest.raises(Overloaded) as refused:
        admitted.open(opening("d"))
    assert (refused.value.value, refused.value.limit) == ("3", "3")
    assert refused.value.retry_after_ms


def test_small_sessions_behind_a_large_one_count_as_waiting() -> None:
    """They fit, and yet they wait for their turn: the queue must not grow without end."""
    admitted, _ = made()
    running, large = admitted.open(opening("a")), admitted.open(opening("b", max_tokens=140))
    with pytest.raises(Overloaded, match="1 sessions run and 1 wait"):
        admitted.open(opening("c"))
    assert list(admitted.waiting) == [large]
    admitted.close(running)
    behind = admitted.open(opening("c"))  # the large one has begun, which leaves its place in the queue
    assert (list(admitted.running.values()), list(admitted.waiting)) == ([large], [behind])


def test_one_that_never_fits_is_told_what_would() -> None:
    admitted, _ = made()
    with pytest.raises(InvalidRequest, match="at most 149") as refused:
        admitted.open(opening("a", max_tokens=150))
    assert refused.value.field == "params.max_tokens"
    assert admitted.open(opening("a", max_tokens=149)) in admitted.running.values()


def test_an_older_epoch_is_fenced_off_and_a_newer_one_takes_over() -> None:
    admitted, target = made()
    old = admitted.open(opening("a", epoch=5))
    with pytest.raises(Fenced, match="epoch 5"):
        admitted.open(opening("a", epoch=4))
    again = admitted.open(opening("a", epoch=5))
    ended = old.outbox.get_nowait()
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, PeerLost), "its owner has opened it twice"
    assert list(admitted.running.values()) == [again]
    admitted.free_closed()
    assert target.freed == ["a"]
    newer = admitted.open(opening("a", epoch=6))
    ended = again.outbox.get_nowait()
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, Fenced)
    assert list(admitted.running.values()) == [newer]
    admitted.close(newer)
    with pytest.raises(Fenced):
        admitted.open(opening("a", epoch=4))


def test_an_epoch_that_no_stream_holds_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged one must not block an id for ever; that of an open session holds as long as the session."""
    now = 100.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now)
    admitted, _ = made(LIMITS.model_copy(update={"max_sessions": 8, "kv_tokens": 4096}))
    held = admitted.open(opening("held", epoch=9))
    admitted.close(admitted.open(opening("left", epoch=9)))
    now += EPOCH_KEPT_S - 1
    for name in ("held", "left"):
        with pytest.raises(Fenced):
            admitted.open(opening(name, epoch=1))
    now += 2
    assert admitted.open(opening("left", epoch=1))
    with pytest.raises(Fenced):
        admitted.open(opening("held", epoch=1))
    assert not held.closed
    admitted.close(held)
    now += EPOCH_KEPT_S - 1
    with pytest.raises(Fenced):
        admitted.open(opening("held", epoch=1))


def test_epochs_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_REMEMBERED_EPOCHS", 3)
    admitted, _ = made()
    for name in "abcd":
        admitted.close(admitted.open(opening(name, epoch=7)))
    with pytest.raises(Fenced):
        admitted.open(opening("b", epoch=6))
    assert admitted.open(opening("a", epoch=6)), "the oldest is forgotten"


def test_an_open_session_is_fenced_however_many_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a coordinator that lost it long ago would take it from the one that continues it."""
    monkeypatch.setattr(admission, "_REMEMBERED_EPOCHS", 3)
    admitted, _ = made()
    held = admitted.open(opening("held", epoch=9))
    for name in "abcd":
        admitted.close(admitted.open(opening(name)))
    with pytest.raises(Fenced, match="at epoch 9"):
        admitted.open(opening("held", epoch=8))
    assert not held.closed
