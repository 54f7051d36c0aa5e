"""One session in virtual time: real control and a real guess tree, between a drafter and a verifier of numbers.

Predicts what a pair brings over a link, and shows how control behaves where
no clock disturbs it. As a program it prints its prediction:

    echo '[{"world": {"rtt_ms": 15}, "wishes": {"gamma": 4}}]' | python -m coordinator.control.simulation
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coordinator.control.gamma import Controller, Estimator, FixedChoices, PairHistory
from coordinator.control.throughput_model import PLAIN, SpeculationPlan
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import Guess, TokenKind, Verdict, VerifyTimings
from outrider.speculation.tree import Block, GuessTree, depth

TRUE = 1  # the token that is right, wherever; others are wrong
WRONG = 1000
_SHARES = (0.65, 0.25, 0.10)  # of what the runners-up hold, by their rank
_NODES = 256
_SHARE = 8  # guesses that a drafter ahead adds to a tree at once


@dataclass(frozen=True, slots=True)
class World:
    """Times in milliseconds. The link lies between coordinator and drafter."""

    acceptance: float = 0.8  # of a first guess whose path is right
    gain: float = 0.6  # of the misses, how many have the truth among the runners-up
    draft_ms: float = 4.0  # per token of a chain or level of a tree
    cost: CostCurve = field(default_factory=lambda: CostCurve((1, 17, 33), (40.0, 40.0, 80.0)))
    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    overhead_ms: float = 1.2  # of a round through three services


@dataclass(slots=True)
class SimulationResult:
    tokens: int = 0
    steps: int = 0
    ms: float = 0.0
    waited_ms: float = 0.0
    checked: int = 0  # steps with guesses
    missed: int = 0
    missed_at_hand: int = 0

    @property
    def tokens_per_s(self) -> float:
        return 1000.0 * self.tokens / self.ms if self.ms else 0.0


@dataclass(slots=True, eq=False)
class _SimulatedNode:
    token: int
    position: int
    parent: _SimulatedNode | None
    score: float
    true: bool
    node_id: int = 0
    gone: bool = False
    children: int = 0


class Simulation:
    """`world` may be replaced in the middle of things."""

    def __init__(
        self,
        world: World,
        gamma_max: int = 16,
        wishes: FixedChoices | None = None,
        history: PairHistory | None = None,
        seed: int = 0,
    ) -> None:
        self.world = world
        self.now = 0.0
        self.controller = Controller(gamma_max, Estimator(gamma_max), wishes or FixedChoices())
        self.controller.estimator.priced(world.cost)
        if history is not None:
            self.controller.estimator.pair.start_from(history)
        self.result = SimulationResult()
        self.plans: list[tuple[float, int, str]] = []  # as they were taken: when, in ms, γ, and what it is called
        self.offered: list[tuple[float, int]] = []  # per step: when, and how long the path it checked
        self._seed = seed
        self._luck = random.Random(seed)
        self._ranks: dict[int, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrives_up = self._arrives_down = 0.0
        self._committed: list[int] = []
        self._tree = GuessTree(self._committed, single=False, max_nodes=_NODES, max_ahead=64)
        self._idle_since = 0.0
        self._stepping = False
        self._drafter = _Drafter(self)
        self._steer()
        self._kick()

    def run(self, tokens: int) -> SimulationResult:
        """So many tokens more; what they took."""
        self.result = SimulationResult()
        began, wanted = self.now, len(self._committed) + tokens
        before = len(self._committed)
        while len(self._committed) < wanted:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.result.ms = self.now - began
        self.result.tokens = len(self._committed) - before
        return self.result

    # Time and luck.

    def after(self, ms: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + ms, self._count, happen))

    def send_up(self, happen: Callable[[], None]) -> None:
        """From drafter to verifier. What is sent later never overtakes."""
        self._arrives_up = max(self._arrives_up, self.now + self._one_way())
        self.after(self._arrives_up - self.now, happen)

    def send_down(self, happen: Callable[[], None]) -> None:
        self._arrives_down = max(self._arrives_down, self.now + self._one_way())
        self.after(self._arrives_down - self.now, happen)

    def _one_way(self) -> float:
        world = self.world
        return (world.rtt_ms + world.overhead_ms) / 2 + self._luck.uniform(0, world.jitter_ms)

    def rank(self, position: int) -> int:
        """Which of the drafter's candidates for a position is right, if it knows what comes before; −1: none."""
        if position not in self._ranks:
            chances = self.chances()
            # Of its own, so that all plans are given the same text.
            drawn = random.Random(self._seed * 1_000_003 + position).random()
            found = -1
            for rank, chance in enumerate(chances):
                drawn -= chance
                if drawn < 0:
                    found = rank
                    break
            self._ranks[position] = found
        return self._ranks[position]

    def chances(self) -> list[float]:
        world = self.world
        return [world.acceptance, *(share * world.gain * (1 - world.acceptance) for share in _SHARES)]

    # The verifier.

    def arrive(self, guess: Guess) -> None:
        tree = bool(guess.parents) or self.controller.plan.branches > 1
        self.controller.estimator.pair.drafted(depth(guess.parents, len(guess.tokens)), guess.draft_us, tree=tree)
        if guess.parent == 0 and guess.position < len(self._committed):
            self.controller.estimator.pair.late(held=guess.tokens[0] == TRUE)
        self._tree.add(guess)
        self._kick()

    def _kick(self) -> None:
        if self._stepping:
            return
        steering = self.controller.plan.for_verifier(self.controller.patience_ms)
        patience_ms = self.controller.patience_ms
        passed = self._tree.passed_at >= len(self._committed)
        waiting = self._committed and patience_ms and not passed and not self._tree.reaches(steering.gamma or 0)
        if waiting and self.now < self._idle_since + patience_ms - 1e-6:
            return
        block = self._tree.block(steering.nodes or _NODES, 64)
        self._stepping = True
        waited = self.now - self._idle_since
        self.result.waited_ms += waited
        step_ms = self.world.cost.at(1 + len(block.tokens))
        self.after(step_ms, lambda: self._judged(block, waited, step_ms))

    def _judged(self, block: Block, waited: float, step_ms: float) -> None:
        path: list[int] = []
        at = 0
        while True:
            held = [
                row for row, parent in enumerate(block.parents, 1) if parent == at and block.tokens[row - 1] == TRUE
            ]
            if not held:
                break
            at = held[0]
            path.append(at)
        position = len(self._committed)
        tokens = (TRUE,) * (len(path) + 1)
        self._committed.extend(tokens)
        self._tree.commit(tokens)
        offered = block.depth
        last = TokenKind.PLAIN if not offered else TokenKind.BONUS if len(path) == offered else TokenKind.RECOVERED
        rows = 1 + len(block.tokens)
        verdict = Verdict(
            position,
            tokens,
            len(path),
            last,
            offered,
            timings=VerifyTimings(
                wait_us=int(waited * 1000),
                step_us=int(step_ms * 1000),
                rows=rows,
                session_rows=rows,
                step_tokens=len(tokens),
            ),
            nodes=len(block.tokens),
            left=self._tree.depth,
            beside=sum(block.ranks[row - 1] > 0 for row in path),
        )
        self._tally(verdict)
        self._stepping = False
        self._idle_since = self.now
        self.controller.judged(verdict)
        self._steer()
        known = len(self._committed)
        self.send_down(lambda: self._drafter.commit(known))
        if self.controller.patience_ms:
            self.after(self.controller.patience_ms, self._kick)
        self._kick()

    def _tally(self, verdict: Verdict) -> None:
        result = self.result
        result.steps += 1
        self.offered.append((self.now, verdict.offered))
        result.checked += verdict.offered > 0
        if verdict.last is TokenKind.RECOVERED:
            result.missed += 1
            result.missed_at_hand += verdict.left > 0

    def _steer(self) -> None:
        before = self.controller.plan
        self.controller.decide(self.world.rtt_ms + self.world.overhead_ms, attached=True)
        plan = self.controller.plan
        if plan != before or self.now == 0.0:
            self.plans.append((self.now, plan.gamma, plan.label))
            self.send_down(lambda: self._drafter.steer(plan))


class _Drafter:
    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation
        self._known = 0
        self._nodes: list[_SimulatedNode] = []
        self._plan = PLAIN
        self._busy = False
        self._next_id = 1
        self._unsent: list[_SimulatedNode] = []
        self._since_us = 0
        self._passed_at = -1

    def steer(self, plan: SpeculationPlan) -> None:
        self._plan = plan
        self._draft()

    def commit(self, known: int) -> None:
        while self._known < known:
            kept: list[_SimulatedNode] = []
            for node in self._nodes:
                if node.position == self._known:
                    node.gone = node.token != TRUE
                    continue
                node.gone = node.parent is not None and node.parent.gone
                if not node.gone:
                    kept.append(node)
                    if node.position == self._known + 1:
                        node.parent = None  # it hangs from what is committed now
            self._nodes = kept
            self._known += 1
        self._unsent = [node for node in self._unsent if not node.gone and node.position >= known]
        self._draft()

    @property
    def _depth(self) -> int:
        return max((node.position + 1 - self._known for node in self._nodes), default=0)

    @property
    def _budget(self) -> int:
        plan = self._plan
        return min(plan.nodes or plan.gamma * plan.branches, _NODES) - len(self._nodes)

    def _draft(self) -> None:
        plan = self._plan
        if self._busy or plan.gamma == 0:
            return
        if self._budget <= 0 or (self._depth >= plan.gamma and not (plan.ahead and plan.branches > 1)):
            self._flush()
            return
        self._busy = True
        asked = self._known
        tops: list[_SimulatedNode | None] = [None, *self._nodes]
        world = self._world.world
        self._world.after(world.draft_ms, lambda: self._drafted(asked, tops))

    def _drafted(self, asked: int, tops: list[_SimulatedNode | None]) -> None:
        """What follows the places that were open when it was asked."""
        self._busy = False
        plan, world = self._plan, self._world
        self._since_us += int(world.world.draft_ms * 1000)
        chances = world.chances()[: plan.branches]
        offers: list[tuple[float, int, _SimulatedNode | None, int, int]] = []
        for top in tops:
            if top is None:
                position, score, fits = asked, 0.0, asked >= self._known
                done = sum(node.parent is None and node.position == position for node in self._nodes)
            else:
                position, score, fits = top.position + 1, top.score, not top.gone
                done = top.children
            if not fits or position < self._known or position >= self._known + plan.gamma:
                continue
            for rank in range(done, len(chances)):
                value = score + math.log(max(chances[rank], 1e-9))
                offers.append((-value, len(offers), top, position, rank))
        heapq.heapify(offers)
        levels = max(1, plan.gamma - self._depth)
        room = max(_SHARE if plan.ahead else 1, self._budget // levels) if plan.branches > 1 else 1
        for _ in range(min(room, self._budget)):
            if not offers:
                break
            value, _, top, position, rank = heapq.heappop(offers)
            right = (top is None or top.true) and world.rank(position) == rank
            node = _SimulatedNode(TRUE if right else WRONG + rank, position, top, -value, right)
            if top is not None:
                top.children += 1
            self._nodes.append(node)
            self._unsent.append(node)
        if plan.ahead:
            self._flush()
        self._draft()

    def _flush(self) -> None:
        fresh = [node for node in self._unsent if not node.gone and node.position >= self._known]
        self._unsent = []
        while fresh:
            top = fresh[0].parent
            numbers: dict[int, int] = {id(top): 0}
            sent: list[_SimulatedNode] = []
            left: list[_SimulatedNode] = []
            for node in fresh:
                if id(node.parent) in numbers and (node.parent is not None or node.position == fresh[0].position):
                    sent.append(node)
                    numbers[id(node)] = len(sent)
                else:
                    left.append(node)
            parents = tuple(numbers[id(node.parent)] for node in sent)
            for node in sent:
                node.node_id = self._next_id
                self._next_id += 1
            guess = Guess(
                sent[0].position,
                sent[0].node_id,
                0 if top is None else top.node_id,
                tuple(node.token for node in sent),
                draft_us=self._since_us,
                parents=() if parents == tuple(range(len(sent))) else parents,
            )
            self._since_us = 0
            self._world.send_up(partial(self._world.arrive, guess))
            fresh = left


def predict(case: dict[str, Any]) -> dict[str, Any]:
    """One case: `world`, or `worlds` one after the other, and `wishes` by their fields, a `cost` as [[rows], [ms]];
    `tokens` in each world after `warm` others, by `seeds`."""
    worlds = [_world(given) for given in case.get("worlds", [case.get("world", {})])]
    wishes = FixedChoices(**case.get("wishes", {}))
    total = SimulationResult()
    ends: list[float] = []
    plans: list[tuple[float, int, str]] = []
    offered: list[tuple[float, int]] = []
    for seed in range(case.get("seeds", 3)):
        simulation = Simulation(worlds[0], case.get("gamma_max", 16), wishes, seed=seed)
        if case.get("warm"):
            simulation.run(case["warm"])
        ends.clear()
        for world in worlds:
            simulation.world = world
            found = simulation.run(case.get("tokens", 512))
            for name in ("tokens", "steps", "ms", "waited_ms", "checked", "missed", "missed_at_hand"):
                setattr(total, name, getattr(total, name) + getattr(found, name))
            ends.append(simulation.now)
        plans, offered = simulation.plans, simulation.offered
    return {
        "tokens_per_s": total.tokens_per_s,
        "tokens_per_step": total.tokens / max(1, total.steps),
        "missed": total.missed,
        "missed_at_hand": total.missed_at_hand,
        "plans": plans,  # of the last seed: when, γ, and what it is called
        "offered": offered,  # likewise: when, and how many guesses in a row a step checked
        "ends_ms": ends,
    }


def _world(given: dict[str, Any]) -> World:
    if "cost" not in given:
        return World(**given)
    rows, ms = given["cost"]
    return World(**{**given, "cost": CostCurve(tuple(rows), tuple(ms))})


def main() -> None:
    """Cases in, as a JSON list; predictions out."""
    json.dump([predict(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
