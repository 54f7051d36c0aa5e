"""The drafting loop beside a verifier in its process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from threading import Event

import pytest

from drafter.beside import build
from drafter.interface import DraftRequest
from drafter.loop import DraftingLoop
from drafter.methods.ngram import NgramDrafter
from drafter.methods.registry import make
from drafter.session import DraftOpening, DraftSession
from outrider.base.step_loop import StepThread
from outrider.observability.metrics import DrafterMetrics
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import DraftSteering, Guess, TokenKind, Verdict
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from outrider.speculation.direct import TakeGuess, TakeVerdict, VerifierBeside

REPEATED = (1, 2, 3, 4, 1, 2, 3, 4)


class Beside:
    """A verifier with one session."""

    def __init__(self) -> None:
        self.thread = StepThread("verifier")
        self.given: asyncio.Queue[Guess] = asyncio.Queue()
        self.take: TakeVerdict | None = None

    def link(self, session_id: str, epoch: int, source: int, take: TakeVerdict) -> TakeGuess | None:
        if (session_id, epoch, source) != ("s", 1, 7):
            return None
        self.take = take
        return self.given.put_nowait


class FailsFor(NgramDrafter):
    """Raises whenever one of some sessions is in the batch; the others' guesses are those of prompt lookup."""

    failing: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(shortest=1, longest=4)
        self.forgotten: list[str] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        if any(request.session.split("@")[0] in self.failing for request in requests):
            raise RuntimeError("this session fails")
        return super().draft(requests)

    def forget(self, session: str) -> None:
        self.forgotten.append(session)
        super().forget(session)


def loop_beside(beside: VerifierBeside | None) -> DraftingLoop:
    return DraftingLoop(make(DrafterSettings(kind="ngram"), print), 4, DrafterMetrics("ngram", "ngram"), beside)


def opening(name: str = "s", *, gamma: int = 2) -> DraftOpening:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=32)
    steering = DraftSteering(gamma=gamma)
    return DraftOpening(name, 1, REPEATED, 4, params, vocab_size=50, steer=steering, direct_source=7)


async def test_guesses_go_straight_to_the_verifier_and_verdicts_come_from_it() -> None:
    beside = Beside()
    loop = loop_beside(beside)
    session = loop.open(opening())
    running = asyncio.create_task(loop.run())
    guess = await asyncio.wait_for(beside.given.get(), 5)
    assert (guess.position, guess.tokens) == (8, (1, 2))
    assert beside.take is not None
    assert beside.take(Verdict(8, (1, 2, 3), 2, TokenKind.BONUS))
    guess = await asyncio.wait_for(beside.given.get(), 5)
    assert (guess.position, guess.tokens) == (11, (4, 1))
    assert beside.take(Verdict(11, (9,), 0, TokenKind.RECOVERED))
    passed = await asyncio.wait_for(beside.given.get(), 5)
    assert (passed.position, passed.tokens) == (12, ()), "nothing to propose, so the verifier need not wait"
    assert beside.take(Verdict(99, (1,), 0, TokenKind.PLAIN))
    assert session.closed, "a gap ends it, and not the verifier"
    assert not beside.take(Verdict(12, (1,), 0, TokenKind.PLAIN)), "it has left"
    running.cancel()
    loop.stop()
    goes_on = Event()
    beside.thread.submit(goes_on.set)
    assert goes_on.wait(5), "it is the verifier's thread"


@pytest.mark.parametrize("beside", [None, Beside()])
def test_a_session_that_is_not_verified_here_cannot_be_drafted_straight(beside: Beside | None) -> None:
    with pytest.raises(InvalidRequest, match="direct_source"):
        loop_beside(beside).open(opening("another"))


async def next_guess(session: DraftSession) -> Guess:
    return await asyncio.wait_for(anext(session.messages()), 5)


@pytest.mark.parametrize("names", [("bad", "b", "c", "d"), ("a", "bad", "c"), ("a", "b", "bad"), ("bad", "b", "bad")])
async def test_a_session_that_fails_is_closed_and_the_others_draft_on(names: tuple[str, ...]) -> None:
    drafter = FailsFor()
    drafter.failing = frozenset({"bad"})
    loop = DraftingLoop(drafter, 4, DrafterMetrics("ngram", "ngram"))
    sessions = [loop.open(replace(opening(name), direct_source=0)) for name in names]
    good = [session for session in sessions if session.id != "bad"]
    running = asyncio.create_task(loop.run())
    for session in good:
        guess = await next_guess(session)
        assert (guess.position, guess.tokens) == (8, (1, 2))
    assert [session.closed for session in sessions] == [name == "bad" for name in names]
    assert loop.load().sessions == len(good)
    for session in good:
        session.commit(8, (1, 2, 3))
        loop.wake()
        guess = await next_guess(session)
        assert (guess.position, guess.tokens) == (11, (4, 1))
    assert set(drafter.forgotten) == {session.key for session in sessions if session.id == "bad"}
    assert not running.done()
    running.cancel()
    loop.stop()


async def test_a_drafter_that_fails_for_all_closes_all_and_takes_new_sessions() -> None:
    drafter = FailsFor()
    drafter.failing = frozenset({"a", "b"})
    loop = DraftingLoop(drafter, 4, DrafterMetrics("ngram", "ngram"))
    sessions = [loop.open(replace(opening(name), direct_source=0)) for name in ("a", "b")]
    running = asyncio.create_task(loop.run())
    for session in sessions:
        assert [guess async for guess in session.messages()] == []
    assert not loop.busy
    guess = await next_guess(loop.open(replace(opening("c"), direct_source=0)))
    assert guess.tokens == (1, 2)
    running.cancel()
    loop.stop()


async def test_a_drafter_whose_device_failed_ends() -> None:
    """Its error is sticky: a process that stayed would take sessions and lose them, again and again."""

    class AcceleratorError(RuntimeError):
        """As torch names it."""

    class Broken(FailsFor):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
            raise AcceleratorError("an illegal memory access")

    loop = DraftingLoop(Broken(), 4, DrafterMetrics("ngram", "ngram"))
    for name in ("a", "b"):
        loop.open(replace(opening(name), direct_source=0))
    with pytest.raises(AcceleratorError):
        await asyncio.wait_for(loop.run(), 5)
    loop.stop()


@pytest.mark.parametrize(("threads", "wanted"), [(0, 3), (1, 1), (4, 2)])
def test_it_takes_half_of_the_verifiers_threads(threads: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the machine's cores: the process may be kept to a few of them."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    service = build(VerifierSettings(threads=threads), "ngram", "target", Beside(), print)
    assert service._settings.threads == wanted
