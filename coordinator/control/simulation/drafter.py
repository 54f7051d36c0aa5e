"""Simulated drafter: it grows chains and trees in virtual time, without a model."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from coordinator.control.simulation.world import SimulatedWorld
from coordinator.control.throughput_model import PLAIN, SpeculationPlan
from outrider.protocol.speculation import MAX_NODES, ROOT, Guess
from outrider.speculation.open_guesses import OpenGuesses

RIGHT = 1  # the right token at every position; all others are wrong
_WRONG = 1000  # plus the token's rank among the drafter's candidates
_NODES_AT_ONCE = 8  # guesses that a drafter ahead adds to a tree at once

_Candidate = tuple[float, int, int, int]  # -score, tie-break, parent, token


class SimulatedDrafter:
    """Drafter of one session; `deliver` receives its guesses at the verifier."""

    def __init__(self, world: SimulatedWorld, deliver: Callable[[Guess], None]) -> None:
        self._world = world
        self._deliver = deliver
        self._open = OpenGuesses(0)
        self._plan = PLAIN
        self._busy = False
        self._unreported_us = 0

    def steer(self, plan: SpeculationPlan) -> None:
        self._plan = plan
        self._draft()

    def commit(self, committed: int) -> None:
        self._open.commit((RIGHT,) * (committed - self._open.guess.position))
        self._draft()

    @property
    def _budget(self) -> int:
        plan = self._plan
        return min(plan.nodes or plan.gamma * plan.branches, MAX_NODES) - len(self._open.guess.tokens)

    def _draft(self) -> None:
        plan = self._plan
        if self._busy or plan.gamma == 0:
            return
        if self._budget <= 0 or (self._open.guess.shape.depth >= plan.gamma and not (plan.ahead and plan.branches > 1)):
            self._flush()
            if self._open.guess.shape.depth < plan.gamma:  # there is nothing to wait for
                self._world.send_up(partial(self._deliver, Guess(self._open.guess.position, 0, 0, ())))
            return
        self._busy = True
        draft_ms = self._world.world.draft_ms
        draft_ms += self._world.delay_ms(draft_ms)
        self._world.after(draft_ms, partial(self._finish_step, self._open.guess, draft_ms))

    def _finish_step(self, before: Guess, draft_ms: float) -> None:
        """Extend the guesses that were open when the step began, unless all that follows them is wrong by now."""
        self._busy = False
        self._unreported_us += int(draft_ms * 1000)
        committed = (RIGHT,) * (self._open.guess.position - before.position)
        if before.walk(committed)[1] == len(committed):
            self._grow(self._open.guess)
        if self._plan.ahead:
            self._flush()
        self._draft()

    def _grow(self, known: Guess) -> None:
        """Add the best candidates."""
        plan = self._plan
        levels = max(1, plan.gamma - self._open.guess.shape.depth)
        width = max(_NODES_AT_ONCE if plan.ahead else 1, self._budget // levels) if plan.branches > 1 else 1
        tokens, parents = list(known.tokens), list(known.shape.parents)
        for _, _, parent, token in heapq.nsmallest(min(width, self._budget), self._candidates(known)):
            tokens.append(token)
            parents.append(parent)
        self._open.extend(replace(known, tokens=tuple(tokens), parents=tuple(parents)), ())

    def _candidates(self, known: Guess) -> list[_Candidate]:
        """Return the nodes that may be added."""
        logprobs = [math.log(max(chance, 1e-9)) for chance in self._world.world.chances()]
        shape, children = known.shape, Counter(known.shape.parents)
        depths = [0, *shape.depths]
        ranks = map(self._rank, known.tokens, (known.position + depth - 1 for depth in shape.depths))
        scores = [0.0, *shape.accumulate(ranks, lambda score, rank: score + logprobs[rank], 0.0)]
        right = [True, *shape.accumulate(known.tokens, lambda right, token: right and token == RIGHT, start=True)]
        candidates: list[_Candidate] = []
        for node in range(ROOT, len(known.tokens)):
            if depths[node + 1] >= self._plan.gamma:
                continue
            right_rank = self._world.right_rank(known.position + depths[node + 1]) if right[node + 1] else -1
            for rank in range(children[node], min(self._plan.branches, len(logprobs))):
                token = RIGHT if rank == right_rank else _WRONG + rank
                candidates.append((-scores[node + 1] - logprobs[rank], len(candidates), node, token))
        return candidates

    def _rank(self, token: int, position: int) -> int:
        return self._world.right_rank(position) if token == RIGHT else token - _WRONG

    def _flush(self) -> None:
        while (guess := self._open.take_unsent(self._unreported_us)) is not None:
            self._world.send_up(partial(self._deliver, guess))
            self._unreported_us = 0
