"""Simulation of one session in virtual time: the real controller and guess tree, simulated drafter and verifier.

It predicts the throughput of a pair over a link and tests the controller
without a clock. As a program it prints predictions:

    echo '[{"world": {"rtt_ms": 15}, "wishes": {"gamma": 4}}]' | python -m coordinator.control.simulation
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.control.estimator import BestDrafter, Estimator, PairHistory
from coordinator.control.gamma import Controller, FixedChoices
from coordinator.control.simulated_drafter import RIGHT, SimulatedDrafter
from coordinator.control.simulated_world import SimulatedWorld, World
from coordinator.control.throughput_model import SpeculationPlan
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import MAX_GAMMA, MAX_NODES, ROOT, Guess, TokenKind, Verdict, VerifyTimings
from outrider.speculation.tree import GuessTree


@dataclass(slots=True)
class SimulationResult:
    """Counters of a simulated stretch of output."""

    tokens: int = 0
    steps: int = 0
    ms: float = 0.0
    waited_ms: float = 0.0
    checked: int = 0  # steps with guesses
    missed: int = 0
    missed_at_hand: int = 0  # misses after which the guess tree still held the next tokens

    @property
    def tokens_per_s(self) -> float:
        return 1000.0 * self.tokens / self.ms if self.ms else 0.0


class Simulation:
    """One simulated session. `world` may be replaced between two runs."""

    def __init__(
        self,
        world: World,
        gamma_max: int = 16,
        fixed: FixedChoices | None = None,
        history: PairHistory | None = None,
        seed: int = 0,
    ) -> None:
        self._world = SimulatedWorld(world, seed)
        self.estimator = Estimator(gamma_max)
        self.estimator.attach_verifier(world.cost)
        if history is not None:
            self.estimator.pair.start_from(history)
        self.controller = Controller(gamma_max, self.estimator, fixed or FixedChoices())
        self.result = SimulationResult()
        self.plans: list[tuple[float, SpeculationPlan]] = []  # each change, with its time in ms
        self.proposed: list[tuple[float, int]] = []  # each step: time in ms, length of the checked path
        self._committed: list[int] = []
        self._tree = GuessTree(self._committed, single=False, max_nodes=MAX_NODES, max_ahead=MAX_GAMMA)
        self._idle_since = 0.0
        self._stepping = False
        self._drafter = SimulatedDrafter(self._world, self._receive)
        self._steer()
        self._start_step()

    @property
    def world(self) -> World:
        return self._world.world

    @world.setter
    def world(self, world: World) -> None:
        self._world.world = world

    @property
    def now(self) -> float:
        """Return the virtual time in milliseconds."""
        return self._world.now

    def run(self, tokens: int) -> SimulationResult:
        """Commit at least this many further tokens and return their counters."""
        self.result = SimulationResult()
        started, before = self.now, len(self._committed)
        while len(self._committed) < before + tokens:
            self._world.run_next()
        self.result.ms = self.now - started
        self.result.tokens = len(self._committed) - before
        return self.result

    def _receive(self, guess: Guess) -> None:
        tree = bool(guess.parents) or self.controller.plan.branches > 1
        pair = self.estimator.pair
        pair.observe_draft(guess.shape.depth, guess.draft_us, tree=tree)
        if guess.parent == 0 and guess.position < len(self._committed):
            pair.observe_late_guess(hit=guess.tokens[0] == RIGHT)
        self._tree.add(guess)
        self._start_step()

    def _start_step(self) -> None:
        if self._stepping:
            return
        timeout_ms = self.controller.wait_timeout_ms
        steering = self.controller.plan.for_verifier(timeout_ms)
        passed = self._tree.passed_at >= len(self._committed)
        waiting = self._committed and timeout_ms and not passed and not self._tree.has_depth(steering.gamma or 0)
        if waiting and self.now < self._idle_since + timeout_ms - 1e-6:
            return
        block = self._tree.block(steering.nodes or MAX_NODES, MAX_GAMMA)
        self._stepping = True
        waited_ms = self.now - self._idle_since
        self.result.waited_ms += waited_ms
        step_ms = self.world.cost.at(1 + len(block.tokens)) * (self.world.burden if block.tokens else 1.0)
        step_ms += self._world.delay_ms(step_ms)
        self._world.after(step_ms, lambda: self._finish_step(block, waited_ms, step_ms))

    def _finish_step(self, block: Guess, waited_ms: float, step_ms: float) -> None:
        verdict = self._verify(block, waited_ms, step_ms)
        self._count(verdict)
        self._stepping = False
        self._idle_since = self.now
        self.controller.observe(verdict, self._best_drafter)
        self._steer()
        committed = len(self._committed)
        self._world.send_down(lambda: self._drafter.commit(committed))
        if self.controller.wait_timeout_ms:
            self._world.after(self.controller.wait_timeout_ms, self._start_step)
        self._start_step()

    def _verify(self, block: Guess, waited_ms: float, step_ms: float) -> Verdict:
        path = _accepted_path(block)
        nodes = self._tree.nodes(block)
        position = len(self._committed)
        tokens = (RIGHT,) * (len(path) + 1)
        self._committed.extend(tokens)
        self._tree.commit(tokens)
        proposed = block.shape.depth
        last = TokenKind.PLAIN if not proposed else TokenKind.BONUS if len(path) == proposed else TokenKind.RECOVERED
        step_tokens = 1 + len(block.tokens)
        return Verdict(
            position,
            tokens,
            len(path),
            last,
            proposed,
            timings=VerifyTimings(
                wait_us=int(waited_ms * 1000),
                step_us=int(step_ms * 1000),
                batch_tokens=step_tokens,
                session_tokens=step_tokens,
                step_tokens=len(tokens),
            ),
            nodes=len(nodes),
            remaining_depth=self._tree.depth,
            accepted_from_branch=sum(nodes[row - 1].rank > 0 for row in path),
        )

    def _count(self, verdict: Verdict) -> None:
        result = self.result
        result.steps += 1
        self.proposed.append((self.now, verdict.proposed))
        result.checked += verdict.proposed > 0
        if verdict.last is TokenKind.RECOVERED:
            result.missed += 1
            result.missed_at_hand += verdict.remaining_depth > 0

    @property
    def _best_drafter(self) -> BestDrafter:
        pair = self.estimator.pair
        round_trips_ms = self.world.rtt_ms + self.world.overhead_ms
        return BestDrafter(round_trips_ms, pair.draft_ms.value, pair.level_ms.value or None, self.world.shared)

    def _steer(self) -> None:
        before = self.controller.plan
        self.controller.decide(self._best_drafter)
        plan = self.controller.plan
        if plan != before or self.now == 0.0:
            self.plans.append((self.now, plan))
            self._world.send_down(lambda: self._drafter.steer(plan))


def _accepted_path(block: Guess) -> list[int]:
    """Return the rows of the block on the path of right tokens; row 0 is the last committed token."""
    path: list[int] = []
    node = ROOT
    while True:
        children = (child for child, parent in enumerate(block.shape.parents) if parent == node)
        right = next((child for child in children if block.tokens[child] == RIGHT), None)
        if right is None:
            return path
        node = right
        path.append(node + 1)


def predict(case: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted throughput of one case.

    Fields: `world`, or `worlds` for several in turn, with `cost` as [[tokens], [ms]]; `wishes` by the fields of
    FixedChoices; `tokens` per world; `warm` tokens before; `seeds`; `gamma_max`.
    """
    worlds = [_world(fields) for fields in case.get("worlds", [case.get("world", {})])]
    fixed = FixedChoices(**case.get("wishes", {}))
    total = SimulationResult()
    ends_ms: list[float] = []
    plans: list[tuple[float, SpeculationPlan]] = []
    proposed: list[tuple[float, int]] = []
    for seed in range(case.get("seeds", 3)):
        simulation = Simulation(worlds[0], case.get("gamma_max", 16), fixed, seed=seed)
        if case.get("warm"):
            simulation.run(case["warm"])
        ends_ms.clear()
        for world in worlds:
            simulation.world = world
            result = simulation.run(case.get("tokens", 512))
            for name in ("tokens", "steps", "ms", "waited_ms", "checked", "missed", "missed_at_hand"):
                setattr(total, name, getattr(total, name) + getattr(result, name))
            ends_ms.append(simulation.now)
        plans, proposed = simulation.plans, simulation.proposed
    return {
        "tokens_per_s": total.tokens_per_s,
        "tokens_per_step": total.tokens / max(1, total.steps),
        "missed": total.missed,
        "missed_at_hand": total.missed_at_hand,
        "plans": [{"ms": ms, "label": plan.label, **asdict(plan)} for ms, plan in plans],  # of the last seed
        "offered": proposed,  # of the last seed
        "ends_ms": ends_ms,
    }


def _world(fields: dict[str, Any]) -> World:
    cost = {"cost": CostCurve(*map(tuple, fields["cost"]))} if "cost" in fields else {}
    return World(**(fields | cost))


def main() -> None:
    """Read cases as a JSON list from standard input and write their predictions to standard output."""
    json.dump([predict(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
