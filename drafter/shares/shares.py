"""The choice of the sessions of a drafting step: those whose guesses bring the most tokens for its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from drafter.interface import DraftRequest
from drafter.session import DraftSession
from drafter.shares.standing import GuessRecord
from drafter.shares.step_cost import StepCost
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import Guess

FEW = 2  # sessions that are always drafted together
_LEAST_PATIENCE = 8  # steps


def patience(sessions: int) -> int:
    """Return in how many steps each of so many sessions has at least one, whatever its guesses bring."""
    return max(_LEAST_PATIENCE, sessions)


def paying_sessions(worths: Sequence[float], left_out: Sequence[int], cost: CostCurve) -> list[int]:
    """Return the sessions of the next step.

    `worths` are the tokens that a level of guesses brings to each session, `left_out` the steps in succession without
    it. A session whose patience ends is taken. The others follow, the most valuable first, as long as each of them
    raises the expected tokens per millisecond.
    """
    limit = patience(len(worths)) - 1
    taken = [session for session, steps in enumerate(left_out) if steps >= limit]
    total = sum(worths[session] for session in taken)
    rest = sorted(set(range(len(worths))) - set(taken), key=lambda session: (-worths[session], -left_out[session]))
    for session in rest:
        if taken and (total + worths[session]) * cost.at(len(taken)) < total * cost.at(len(taken) + 1):
            break
        taken.append(session)
        total += worths[session]
    return taken


class DraftingShares:
    """Choice of the next step's sessions by the measured cost of steps, where a drafter has more than a few.

    It depends on committed tokens and on how many guesses are open, never on the tokens of the guesses.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._records: WeakKeyDictionary[DraftSession, GuessRecord] = WeakKeyDictionary()
        self._halved = False

    def next_step(self, sessions: Mapping[str, DraftSession]) -> Mapping[str, DraftSession]:
        """Return the sessions of the next step; none if none needs guesses."""
        for session in sessions.values():
            self._record(session).follow(session.committed, session.open_guesses.guess)
        wanting = [key for key, session in sessions.items() if session.wants_more]
        chosen = {wanting[index] for index in self._choice([sessions[key] for key in wanting])}
        for key in wanting:
            record = self._record(sessions[key])
            record.left_out = 0 if key in chosen else record.left_out + 1
        return {key: sessions[key] for key in wanting if key in chosen}

    def measure(self, requests: Mapping[DraftSession, DraftRequest], guesses: Sequence[Guess], spent_s: float) -> None:
        """Add a step's time. A step in which a prompt was read does not count."""
        levels = max(map(DraftRequest.new_levels, requests.values(), guesses))
        if levels and all(self._record(session).drafted for session in requests):
            self._cost.add(len(requests), spent_s * 1000 / levels)
        for session, guess in zip(requests, guesses, strict=True):
            self._record(session).drafts(guess)

    def _record(self, session: DraftSession) -> GuessRecord:
        record = self._records.get(session)
        if record is None:
            record = self._records[session] = GuessRecord()
        return record

    def _choice(self, sessions: Sequence[DraftSession]) -> Sequence[int]:
        every = range(len(sessions))
        if len(sessions) <= FEW:
            return every
        worths = [self._worth(session) for session in sessions]
        if (cost := self._cost.curve) is not None:
            return paying_sessions(worths, [self._record(session).left_out for session in sessions], cost)
        self._halved = not self._halved  # every other step is smaller, until the cost of sessions is known
        ranked = sorted(every, key=lambda session: -worths[session])
        return ranked[: len(ranked) // 2] if self._halved else every

    def _worth(self, session: DraftSession) -> float:
        levels = session.open_guesses.guess.shape.depth, session.depth
        return self._record(session).standing(*levels, awaited=not session.eager).worth
