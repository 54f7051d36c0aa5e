"""How right drafters have been, by what was committed afterwards. Pure; `blend` chooses by it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drafter.interface import DraftRequest, DraftResult
from outrider.protocol.speculation import MAX_GAMMA

_FADES = 0.95  # per thing judged: the last twenty or so count
_PRIOR = 4.0  # what is expected beforehand weighs as much as this many things judged
_STEPS = (1.0, 2.0, 4.0, 8.0)  # expectations are held to account apart by their size
_MAX_PENDING = 2 * MAX_GAMMA


@dataclass(slots=True)
class Rate:
    """So much of so much, the latest weighing most."""

    good: float = 0.0
    all: float = 0.0

    def add(self, good: float, of: float = 1.0) -> None:
        self.good = self.good * _FADES + good
        self.all = self.all * _FADES + of

    def value(self, prior: float) -> float:
        return (self.good + prior * _PRIOR) / (self.all + _PRIOR)


@dataclass(slots=True)
class Record:
    """How one drafter did: how often its tokens held, and how far what it expected of its guesses came true."""

    hits: Rate = field(default_factory=Rate)
    kept_promises: list[Rate] = field(default_factory=lambda: [Rate() for _ in range(len(_STEPS) + 1)])

    def judged(self, expected: float, accepted: int) -> None:
        self.kept_promises[bisect.bisect(_STEPS, expected)].add(accepted, expected)

    def likely(self, expected: float, wide: Record) -> float:
        """What is to be expected where the drafter expects so much; `wide` is the record of all sessions."""
        step = bisect.bisect(_STEPS, expected)
        return expected * self.kept_promises[step].value(wide.kept_promises[step].value(1.0))

    def hit_rate(self, wide: Record, prior: float) -> float:
        return self.hits.value(wide.hits.value(prior))


@dataclass(frozen=True, slots=True)
class _Promise:
    """A chain that was proposed behind a token, used or not."""

    name: str
    start: int
    before: int
    tokens: tuple[int, ...]
    expected: float


class AccuracyTracker:
    """What one session's drafters have said of positions that are not committed yet.

    A guess is judged if the token before it came true: looking at its whole
    path would cost more than the few mistakes that this makes.
    """

    def __init__(self, committed: int) -> None:
        self._committed = committed
        self._promises: dict[tuple[str, int], _Promise] = {}
        self._guessed: dict[tuple[str, int], dict[int, set[int]]] = {}  # by name and position: token before → tokens

    def promise(self, name: str, ask: DraftRequest, tokens: tuple[int, ...], expected: float) -> None:
        """A chain behind `ask.tokens`, and how much of it is expected to hold."""
        start = len(ask.tokens)
        if tokens and len(self._promises) < _MAX_PENDING:
            self._promises[name, start] = _Promise(name, start, ask.tokens[-1], tokens, expected)

    def drafted(self, name: str, ask: DraftRequest, draft: DraftResult) -> None:
        """Tokens, in a chain or a tree, that are to be judged one by one."""
        for position, before, token in placed(ask, draft):
            self._guessed.setdefault((name, position), {}).setdefault(before, set()).add(token)

    def hear(self, ask: DraftRequest, records: Sequence[dict[str, Record]]) -> int:
        """Judge what `ask` shows to be committed, into all `records`; how many tokens are new."""
        new = range(self._committed, ask.committed)
        if not new:
            return 0
        self._committed = ask.committed
        for name, held in self._hits(ask.tokens, new):
            for record in records:
                record[name].hits.add(held)
        for promise, accepted in self._outcomes(ask):
            for record in records:
                record[promise.name].judged(promise.expected, accepted)
        return len(new)

    def _hits(self, tokens: Sequence[int], new: range) -> Iterator[tuple[str, bool]]:
        for name, position in [key for key in self._guessed if key[1] < new.stop]:
            said = self._guessed.pop((name, position))
            if position >= new.start and tokens[position - 1] in said:
                yield name, tokens[position] in said[tokens[position - 1]]

    def _outcomes(self, ask: DraftRequest) -> Iterator[tuple[_Promise, int]]:
        """Promises that came to an end; those that were never put to the test are dropped."""
        for key, promise in list(self._promises.items()):
            if promise.start >= ask.committed:
                continue
            known = ask.tokens[promise.start : min(ask.committed, promise.start + len(promise.tokens))]
            agreed = next((i for i, token in enumerate(known) if token != promise.tokens[i]), len(known))
            if ask.tokens[promise.start - 1] != promise.before:
                del self._promises[key]
            elif agreed < len(known) or agreed == len(promise.tokens):
                del self._promises[key]
                yield promise, agreed


def placed(ask: DraftRequest, draft: DraftResult) -> Iterator[tuple[int, int, int]]:
    """Of each drafted token its position, the token before it, and itself."""
    if not draft.parents:
        before = ask.tokens[-1]
        for position, token in enumerate(draft.tokens, start=len(ask.tokens)):
            yield position, before, token
            before = token
        return
    tokens = (*ask.open_tokens, *draft.tokens)
    positions: list[int] = []
    for node, parent in enumerate((*ask.open_parents, *draft.parents)):
        positions.append(positions[parent] + 1 if parent >= 0 else ask.committed)
        if node >= len(ask.open_tokens):
            yield positions[node], tokens[parent] if parent >= 0 else ask.tokens[ask.committed - 1], tokens[node]
