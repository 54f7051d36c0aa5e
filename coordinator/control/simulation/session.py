"""Simulated session: a real controller and guess tree with a simulated drafter. A simulated verifier runs its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.control.estimator import BestDrafter, Estimator, PairHistory
from coordinator.control.gamma import Controller, FixedChoices
from coordinator.control.simulation.drafter import RIGHT, SimulatedDrafter
from coordinator.control.simulation.world import SimulatedWorld, World
from coordinator.control.throughput_model import SpeculationPlan
from outrider.protocol.speculation import MAX_GAMMA, MAX_NODES, Guess, TokenKind, Verdict, VerifyTimings, path_to
from outrider.speculation.goodput import new_pace
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


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A verifier's step, as it ended."""

    ms: float
    sessions: int
    tokens: int  # of its batch
    committed: int


class SimulatedSession:
    """One session. Its verifier asks what is to be checked, and tells it when a step has ended."""

    def __init__(
        self,
        world: SimulatedWorld,
        wake: Callable[[], None],
        gamma_max: int = 16,
        fixed: FixedChoices | None = None,
        history: PairHistory | None = None,
        sessions: int = 0,
    ) -> None:
        """Open a session beside `sessions` others; `wake` tells the verifier that it may be ready."""
        self._world = world
        self._wake = wake
        self.estimator = Estimator(gamma_max)
        self.estimator.attach_verifier(world.world.cost, sessions)
        if history is not None:
            self.estimator.pair.start_from(history)
        self.controller = Controller(gamma_max, self.estimator, fixed or FixedChoices())
        self.result = SimulationResult()
        self.plans: list[tuple[float, SpeculationPlan]] = []  # each change, with its time in ms
        self.proposed: list[tuple[float, int]] = []  # each step: time in ms, length of the checked path
        self.committed: list[int] = []
        self.tree = GuessTree(self.committed, single=False)
        self.pace = new_pace()
        self._idle_since = 0.0
        self._drafter = SimulatedDrafter(self._world, self._receive)
        self._steer()

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

    @property
    def paying_guesses(self) -> int:
        return self.controller.paying_nodes

    def delay_ms(self, work_ms: float) -> float:
        return self._world.delay_ms(work_ms)

    def ready(self) -> bool:
        """Return whether a step may take the session: it waits for no guess, or no longer."""
        timeout_ms = self.controller.wait_timeout_ms
        gamma = self.controller.plan.for_verifier(timeout_ms).gamma or 0
        passed = self.tree.passed_at >= len(self.committed)
        waiting = self.committed and timeout_ms and not passed and self.tree.depth < gamma
        return not waiting or self.now >= self._idle_since + timeout_ms - 1e-6

    def block(self, compared: int) -> Guess:
        """Return the guesses that the next step checks, or `compared` of those among which it chooses."""
        most = min(self.paying_guesses, compared) or self.controller.plan.budget or MAX_NODES
        return self.tree.block(most, MAX_GAMMA)

    def start_step(self) -> float:
        """Return how long the session has waited for the step that begins now."""
        waited_ms = self.now - self._idle_since
        self.result.waited_ms += waited_ms
        return waited_ms

    def finish_step(self, block: Guess, path: list[int], waited_ms: float, step: SimulatedStep) -> None:
        """Commit the guesses on this path and one more token, and choose a plan again."""
        verdict = self._commit(block, path, waited_ms, step)
        self._count(verdict)
        self._idle_since = self.now
        self.pace.add(len(verdict.tokens))
        self.controller.observe(verdict, self._best_drafter)
        self._steer()
        committed = len(self.committed)
        self._world.send_down(lambda: self._drafter.commit(committed))
        if self.controller.wait_timeout_ms:
            self._world.after(self.controller.wait_timeout_ms, self._wake)

    def _receive(self, guess: Guess) -> None:
        tree = bool(guess.parents) or self.controller.plan.branches > 1
        pair = self.estimator.pair
        pair.observe_draft(guess.shape.depth, guess.draft_us, tree=tree)
        if guess.tokens and guess.parent == 0 and guess.position < len(self.committed):
            pair.observe_late_guess(hit=guess.tokens[0] == RIGHT)
        self.tree.add(guess)
        self._wake()

    def _commit(self, block: Guess, path: list[int], waited_ms: float, step: SimulatedStep) -> Verdict:
        nodes = self.tree.nodes(block)
        position = len(self.committed)
        tokens = (RIGHT,) * (len(path) + 1)
        self.committed.extend(tokens)
        self.tree.commit(tokens)
        proposed = block.shape.depth
        last = TokenKind.PLAIN
        if proposed:
            last = TokenKind.BONUS if len(path) == proposed else TokenKind.RECOVERED
        return Verdict(
            position,
            tokens,
            len(path),
            last,
            proposed,
            timings=VerifyTimings(
                wait_us=int(waited_ms * 1000),
                step_us=int(step.ms * 1000),
                sessions=step.sessions,
                batch_tokens=step.tokens,
                session_tokens=1 + len(block.tokens),
                step_tokens=step.committed,
            ),
            nodes=len(nodes),
            remaining_depth=self.tree.depth,
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
        draft_ms, level_ms = self.estimator.pair.draft_ms.value, self.estimator.pair.level_ms.value
        round_trips_ms = self.world.rtt_ms + self.world.overhead_ms
        return BestDrafter(round_trips_ms, draft_ms or level_ms, level_ms or None, self.world.shared)

    def _steer(self) -> None:
        before = self.controller.plan
        self.controller.decide(self._best_drafter)
        plan = self.controller.plan
        if plan != before or self.now == 0.0:
            self.plans.append((self.now, plan))
            self._world.send_down(lambda: self._drafter.steer(plan))


def accepted_path(block: Guess) -> list[int]:
    """Return the rows of the block on the path of right tokens; row 0 is the last committed token."""
    last, _ = block.walk((RIGHT,) * len(block.tokens))
    return [node + 1 for node in path_to(last, block.shape.parents)]
