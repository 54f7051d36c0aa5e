"""Throughput model: the expected tokens per second of each way to speculate. Pure: no clocks, no I/O.

Plain decoding commits one token per step. In turns, the verifier waits for γ guesses and checks them, and the drafter
waits for the verdict. Ahead, the drafter continues while its guesses are checked, so only a miss costs time. After a
miss the verifier either waits for a few guesses or decodes plain tokens until the drafter has caught up. docs/gamma.md
derives the formulas.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from types import MappingProxyType
from typing import NamedTuple

from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import MAX_DRAFT_WAIT_US, MAX_GAMMA, MAX_NODES, DraftSteering, VerifySteering

MIN_WAIT_TIMEOUT_MS = 2.0
MAX_WAIT_TIMEOUT_MS = 1_000.0
OPEN_NODES = 128  # guesses of a tree that a drafter ahead keeps open
BRANCHES = (2, 3, 4)
BRANCHES_AHEAD = 3
BUDGETS_AHEAD = (1, 2, 4, 8, 16, 32)
AWAITED_AHEAD = (1, 2, 4)
MAX_TREE_NODES = 32  # of a tree in turns
MAX_ACCEPTANCE = 0.99  # keeps the mean distance between two misses finite
_RELATIVE_GAIN = {1: 0.0, 2: 0.7, 3: 1.0, 4: 1.15}  # gain by number of branches; three branches are the unit


class Mode(enum.StrEnum):
    """Ways to speculate. The values are metric labels and keys of the stored pair history."""

    PLAIN = "plain"
    TURNS = "turns"
    TREE_TURNS = "tree turns"
    AHEAD = "ahead"
    AHEAD_WAITING = "ahead, waiting"
    TREE_AHEAD = "tree ahead"
    TREE_AHEAD_WAITING = "tree ahead, waiting"


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Settings by which a session is drafted and verified."""

    gamma: int = 0  # how far the drafter guesses
    branches: int = 1
    ahead: bool = False
    budget: int = 0  # guesses checked per step; 0: all that are open
    awaited: int = 0  # ahead: guesses that the verifier waits for after a miss; 0: it does not wait

    @property
    def mode(self) -> Mode:
        if self.gamma == 0:
            return Mode.PLAIN
        way = (Mode.AHEAD_WAITING if self.awaited else Mode.AHEAD) if self.ahead else Mode.TURNS
        return Mode(f"tree {way}") if self.branches > 1 else way

    @property
    def label(self) -> str:
        """Return the plan's description for statistics and logs."""
        if self.gamma == 0:
            return "plain"
        text = f"γ {self.gamma}" + (f" × {self.branches}" if self.branches > 1 else "")
        if not self.ahead:
            return text
        wait = f"wait for {self.awaited}" if self.awaited else "no wait"
        return f"{text} ahead, {self.budget or 'all'} a step, {wait}"

    @property
    def nodes(self) -> int:
        """Return the number of guesses that the drafter may have open; 0 stands for γ × branches."""
        return OPEN_NODES if self.ahead and self.branches > 1 else 0

    def for_drafter(self, drafters: int = 1) -> DraftSteering:
        """Return the steering of one of so many drafters of a session, whose open guesses fit its tree together."""
        nodes = min(self.nodes or self.gamma * self.branches, MAX_NODES // drafters)
        return DraftSteering(gamma=self.gamma, branches=self.branches, nodes=nodes, eager=self.ahead)

    def for_verifier(self, wait_timeout_ms: float) -> VerifySteering:
        return VerifySteering(
            gamma=self.awaited if self.ahead else self.gamma,
            draft_wait_us=int(min(MAX_DRAFT_WAIT_US, wait_timeout_ms * 1000)),
            nodes=self.budget,
        )


PLAIN = SpeculationPlan()


class Conditions(NamedTuple):
    """Measurements that a choice of plan depends on. Times are in milliseconds."""

    acceptance: tuple[float, ...]  # chance that guess i of a chain is accepted, given that those before it were
    proposal_rate: float  # share of steps for which the drafter has a guess
    draft_ms: float  # per token of a chain
    network_ms: float  # from a verdict to the guess that follows it, without drafting: both round trips
    cost: CostCurve  # of a verifier's step
    between_ms: float = 0.0  # from a plain step to the next
    other_tokens: float = 0.0  # batch tokens of the other sessions in our steps
    other_sessions: float = 0.0  # number of these sessions
    other_tokens_per_ms: float = 0.0  # tokens that they commit, per millisecond of a step
    tree_gain: float = 0.4  # share of failed first guesses for which another branch of the step holds the right token
    ahead_gain: float = 0.4  # the same where the drafter continues: anywhere in the tree
    nodes_per_level: float = 2.0  # guesses of a tree per guess of its longest path
    level_ms: float | None = None  # drafting time per level of a tree; None: as for a chain
    timeout_rate: float = 0.0  # share of the waits that timed out without a guess
    shortfall_rate: float = 0.0  # share of the waits that timed out with fewer guesses than γ
    throughput_ratios: Mapping[Mode, float] = MappingProxyType({})  # measured over expected throughput
    shares_cores: bool = False  # the drafter, with the verifier
    shared: bool = False  # the verifier, with other sessions

    def verify_ms(self, guesses: float) -> float:
        """Return the time of a step that checks this number of our guesses."""
        return self.cost.at(self.other_tokens + 1.0 + guesses)

    def acceptance_of(self, plan: SpeculationPlan) -> tuple[float, ...]:
        """Return the acceptance per position with the gain of the plan's branches."""
        if plan.branches == 1:
            return self.acceptance
        gain = min(1.0, (self.ahead_gain if plan.ahead else self.tree_gain) * _RELATIVE_GAIN.get(plan.branches, 1.15))
        return tuple(a + gain * (1.0 - a) for a in self.acceptance)

    def draft_step_ms(self, branches: int) -> float:
        """Return the time to draft one more token of a chain or one more level of a tree."""
        return self.draft_ms if branches == 1 or self.level_ms is None else self.level_ms


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan with the draft wait timeout and the throughput that are expected of it."""

    plan: SpeculationPlan
    wait_timeout_ms: float
    tokens_per_s: float


def expected_tokens(acceptance: Sequence[float], gamma: int) -> float:
    """Return the mean number of tokens that a step with γ guesses commits, the target's own token included."""
    each = chain(acceptance[:gamma], repeat(acceptance[-1], gamma - len(acceptance)))
    return 1.0 + float(sum(accumulate(each, operator.mul)))


def draft_wait_ms(conditions: Conditions, guesses: int, branches: int = 1) -> float:
    """Return the time from a verdict until a path of this many new guesses is at the verifier."""
    return conditions.network_ms + guesses * conditions.draft_step_ms(branches)


def throughput(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Return the expected tokens per second, corrected by what the plan's mode has delivered so far."""
    plain_ms = conditions.verify_ms(0)
    plain = 1000.0 / max(plain_ms + conditions.between_ms, 1e-6)
    if plan.gamma == 0:
        return plain
    expected = _throughput_ahead(conditions, plan, plain) if plan.ahead else _throughput_in_turns(conditions, plan)
    # A wait that times out yields one plain token, and late.
    timed_out = 1000.0 / max(plain_ms + draft_wait_timeout_ms(conditions, plan), 1e-6)
    expected = (1.0 - conditions.timeout_rate) * expected + conditions.timeout_rate * timed_out
    ratio = conditions.throughput_ratios.get(plan.mode, 1.0)
    # Past luck alone must not lift a plan above plain decoding.
    return expected * (ratio if expected > plain else min(1.0, ratio))


def guesses_per_step(plan: SpeculationPlan) -> int:
    return plan.budget if plan.ahead else plan.gamma * plan.branches


def _throughput_in_turns(conditions: Conditions, plan: SpeculationPlan) -> float:
    proposed = conditions.proposal_rate
    tokens = proposed * expected_tokens(conditions.acceptance_of(plan), plan.gamma) + (1.0 - proposed)
    # A drafter without a guess reports that after one round trip.
    wait = proposed * draft_wait_ms(conditions, plan.gamma, plan.branches) + (1.0 - proposed) * conditions.network_ms
    verify = proposed * conditions.verify_ms(guesses_per_step(plan)) + (1.0 - proposed) * conditions.verify_ms(0)
    return 1000.0 * tokens / max(wait + verify, 1e-6)


def _throughput_ahead(conditions: Conditions, plan: SpeculationPlan, plain: float) -> float:
    """Return the expected tokens per second of drafting ahead; 1 / (1 − acceptance) tokens lie between two misses."""
    acceptance = mean_acceptance(conditions.acceptance_of(plan))
    draft_ms = max(conditions.draft_step_ms(plan.branches), 1e-3)
    verify_ms = max(conditions.verify_ms(plan.budget), 1e-3)
    longest = plan.budget / (conditions.nodes_per_level if plan.branches > 1 else 1.0)
    # Blocks in flight share the window, and a step cannot check more than is drafted during a step.
    late = math.ceil(conditions.network_ms / verify_ms)
    block = max(0.0, min(longest, (plan.gamma - 1) / (1 + late), verify_ms / draft_ms - 1.0))
    run = 1.0 / (1.0 - acceptance)
    later_steps = 1.0 / (1.0 - math.pow(acceptance, block + 1.0))
    if plan.awaited:
        first = min(plan.awaited, longest)
        steps = 1.0 + math.pow(acceptance, first + 1.0) * later_steps
        per_ms = run / (steps * verify_ms + draft_wait_ms(conditions, plan.awaited, plan.branches))
    else:
        plain_ms = max(conditions.verify_ms(0), 1e-3)
        if plain_ms <= draft_ms:
            return plain
        # The drafter has caught up after `behind` plain tokens, if it guessed all of them.
        behind = max(1, math.ceil((conditions.network_ms + draft_ms) / (plain_ms - draft_ms)))
        caught_up = math.pow(max(acceptance, 1e-3), min(behind, 64))
        alone = (1.0 - caught_up) / ((1.0 - acceptance) * caught_up)
        first = min(longest, max(0.0, (behind * plain_ms - conditions.network_ms) / draft_ms - behind))
        checking_ms = verify_ms * (1.0 + math.pow(acceptance, first + 1.0) * later_steps)
        per_ms = (alone + run) / (alone * plain_ms + checking_ms)
    proposed = conditions.proposal_rate
    return proposed * 1000.0 * per_ms + (1.0 - proposed) * plain


def mean_acceptance(acceptance: Sequence[float]) -> float:
    """Return the single chance for all positions that gives the same mean number of accepted guesses."""
    accepted = expected_tokens(acceptance, MAX_GAMMA) - 1.0
    return min(MAX_ACCEPTANCE, accepted / (1.0 + accepted))


def candidate_plans(
    gamma_max: int, branches: Sequence[int] = (1, *BRANCHES), *, gamma_ahead: int | None = None
) -> Iterator[SpeculationPlan]:
    """Yield all plans to choose from; `gamma_ahead` replaces twice `gamma_max` as γ of drafting ahead."""
    yield PLAIN
    for width in branches:
        for gamma in range(1, gamma_max + 1):
            if width == 1 or gamma * width <= MAX_TREE_NODES:
                yield SpeculationPlan(gamma, width)
    # One block is drafted while the one before is checked.
    gamma = min(MAX_GAMMA, 2 * gamma_max) if gamma_ahead is None else gamma_ahead
    widths = branches if len(branches) == 1 else [width for width in branches if width in (1, BRANCHES_AHEAD)]
    for width in widths:
        for budget in BUDGETS_AHEAD:
            for awaited in (0, *AWAITED_AHEAD):
                if gamma_max and awaited <= budget <= gamma:
                    yield SpeculationPlan(gamma, width, ahead=True, budget=budget, awaited=awaited)


def draft_wait_timeout_ms(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Return twice the expected wait: enough for jitter, and a stalled drafter costs little."""
    awaited = plan.awaited if plan.ahead else plan.gamma
    if awaited == 0:
        return 0.0
    expected = draft_wait_ms(conditions, awaited, plan.branches)
    return min(MAX_WAIT_TIMEOUT_MS, max(MIN_WAIT_TIMEOUT_MS, 2.0 * expected))
