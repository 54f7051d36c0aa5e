"""The ways to speculate, and what each would bring: a model of pipelines, links and trees. Pure: no clocks, no I/O.

Plain decoding commits a token per step. In turns, the verifier waits for γ
guesses, checks them, and the drafter waits for its verdict. Ahead, the
drafter never stops: while one block of guesses is checked the next is under
way, and only a miss costs time. After a miss the verifier either waits for a
few guesses or goes on plain until the drafter has caught up. docs/gamma.md
derives the formulas.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.speculation import MAX_GAMMA, Steering

MIN_PATIENCE_MS = 2.0
MAX_PATIENCE_MS = 1_000.0
OPEN_NODES = 128  # guesses of a tree that a drafter ahead keeps open
BRANCHES = (2, 3, 4)
BRANCHES_AHEAD = 3
ROWS_AHEAD = (4, 8, 16, 32)
WANTS = (1, 2, 4)
MOST_NODES = 32  # of a tree in turns
CERTAIN = 0.99
_GAIN = {1: 0.0, 2: 0.7, 3: 1.0, 4: 1.15}  # of what three branches add, so much is had with others


class Mode(enum.StrEnum):
    PLAIN = "plain"
    TURNS = "turns"
    TREE_TURNS = "tree turns"
    AHEAD = "ahead"
    AHEAD_WAITING = "ahead, waiting"
    TREE_AHEAD = "tree ahead"
    TREE_AHEAD_WAITING = "tree ahead, waiting"


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How a session is drafted and verified."""

    gamma: int = 0  # how far the drafter guesses
    branches: int = 1
    ahead: bool = False
    rows: int = 0  # guesses checked per step; 0: all there are
    want: int = 0  # ahead: guesses that the verifier waits for after a miss; 0: it does not wait

    @property
    def way(self) -> Mode:
        if self.gamma == 0:
            return Mode.PLAIN
        if self.ahead and self.want:
            return Mode.TREE_AHEAD_WAITING if self.branches > 1 else Mode.AHEAD_WAITING
        if self.ahead:
            return Mode.TREE_AHEAD if self.branches > 1 else Mode.AHEAD
        return Mode.TREE_TURNS if self.branches > 1 else Mode.TURNS

    @property
    def label(self) -> str:
        if self.gamma == 0:
            return "plain"
        text = f"γ {self.gamma}" + (f" × {self.branches}" if self.branches > 1 else "")
        if not self.ahead:
            return text
        return f"{text} ahead, {self.rows} a step, " + (f"wait for {self.want}" if self.want else "no wait")

    @property
    def nodes(self) -> int:
        """Guesses that the drafter may have open; 0: γ × branches."""
        return OPEN_NODES if self.ahead and self.branches > 1 else 0

    def for_drafter(self) -> Steering:
        return Steering(gamma=self.gamma, branches=self.branches, nodes=self.nodes, eager=self.ahead)

    def for_verifier(self, patience_ms: float) -> Steering:
        return Steering(
            gamma=self.want if self.ahead else self.gamma, patience_us=int(patience_ms * 1000), nodes=self.rows
        )


PLAIN = SpeculationPlan()


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a choice depends on. Times in milliseconds."""

    acceptance: tuple[float, ...]  # chance that guess i of a chain holds, given that those before it did
    offer_rate: float  # share of steps for which the drafter has a guess at all
    draft_ms: float  # per guessed token of a chain
    link_ms: float  # from a verdict to the guess that follows it, drafting aside: both round trips
    cost: CostCurve  # of a verifier's step, by its rows
    other_rows: float = 0.0  # of the sessions that share our steps
    others: float = 0.0  # how many these are
    other_rate: float = 0.0  # their tokens, per millisecond of a step
    tree_gain: float = 0.4  # of first guesses that fail, how many have the truth beside them in the same step
    ahead_gain: float = 0.4  # or in the tree at least, where the drafter goes on
    tree_rows: float = 2.0  # guesses of a tree per guess of its longest path
    level_ms: float | None = None  # drafting, per level of a tree; None: as for a chain
    silence: float = 0.0  # share of the waits in which nobody said anything, to the end of patience
    paces: Mapping[Mode, float] = field(default_factory=dict)  # what each way brought, against what was expected

    def verify_ms(self, guesses: float) -> float:
        """A step that checks so many guesses of ours."""
        return self.cost.at(self.other_rows + 1.0 + guesses)

    def accepted(self, plan: SpeculationPlan) -> tuple[float, ...]:
        if plan.branches == 1:
            return self.acceptance
        gain = min(1.0, (self.ahead_gain if plan.ahead else self.tree_gain) * _GAIN.get(plan.branches, 1.15))
        return tuple(a + gain * (1.0 - a) for a in self.acceptance)

    def step_ms(self, branches: int) -> float:
        """Drafting one more token, or one more level."""
        return self.draft_ms if branches == 1 or self.level_ms is None else self.level_ms


@dataclass(frozen=True, slots=True)
class PlanChoice:
    plan: SpeculationPlan
    patience_ms: float
    tokens_per_s: float  # expected


def expected_tokens(acceptance: Sequence[float], gamma: int) -> float:
    """Tokens that a step with γ guesses commits on average: the target's own and what holds before it."""
    total, reached = 1.0, 1.0
    for i in range(gamma):
        reached *= acceptance[min(i, len(acceptance) - 1)]
        total += reached
    return total


def wait_ms(conditions: Conditions, guesses: int, branches: int = 1) -> float:
    """From a verdict until a path of so many new guesses is at the verifier."""
    return conditions.link_ms + guesses * conditions.step_ms(branches)


def rate(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Expected tokens per second, as far as the ways are known here."""
    plain = 1000.0 / max(conditions.verify_ms(0), 1e-6)
    if plan.gamma == 0:
        return plain
    brings = _ahead(conditions, plan, plain) if plan.ahead else _in_turns(conditions, plan)
    # Waiting for a silent drafter brings a plain token, and late.
    in_vain = 1000.0 / max(conditions.verify_ms(0) + patience_for(conditions, plan), 1e-6)
    brings = (1.0 - conditions.silence) * brings + conditions.silence * in_vain
    pace = conditions.paces.get(plan.way, 1.0)
    return brings * (pace if brings > plain else min(1.0, pace))  # luck is no reason to leave plain


def worth(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Expected tokens per second, less those that the others of the verifier lose by our guesses: where a step takes
    the longer the more rows it has, all wait for ours.

    Rows that are free now are not all ours: the others are met halfway to
    doing as we do, so that whoever came first does not keep them.
    """
    if plan.gamma == 0 or conditions.others <= 0.0:
        return rate(conditions, plan)
    likewise = conditions.others * (1.0 + guesses_per_step(plan))
    rows = max(conditions.other_rows, (conditions.other_rows + likewise) / 2)
    shared = replace(conditions, other_rows=rows)
    return rate(shared, plan) - 1000.0 * conditions.other_rate * _delay(shared, plan)


def guesses_per_step(plan: SpeculationPlan) -> int:
    return plan.rows if plan.ahead else plan.gamma * plan.branches


def _delay(conditions: Conditions, plan: SpeculationPlan) -> float:
    """By how much of the time our guesses hold up steps that others share."""
    waits = wait_ms(conditions, plan.gamma, plan.branches)
    if plan.ahead:  # only after a miss, if at all
        missed = 1.0 - mean_acceptance(conditions.accepted(plan))
        waits = missed * wait_ms(conditions, plan.want, plan.branches) if plan.want else 0.0
    step_ms = conditions.verify_ms(guesses_per_step(plan))
    return conditions.offer_rate * (step_ms - conditions.verify_ms(0)) / max(step_ms + waits, 1e-6)


def _in_turns(conditions: Conditions, plan: SpeculationPlan) -> float:
    offered = conditions.offer_rate
    tokens = offered * expected_tokens(conditions.accepted(plan), plan.gamma) + (1.0 - offered)
    # A drafter without a guess says so after one link's time.
    wait = offered * wait_ms(conditions, plan.gamma, plan.branches) + (1.0 - offered) * conditions.link_ms
    verify = offered * conditions.verify_ms(guesses_per_step(plan)) + (1.0 - offered) * conditions.verify_ms(0)
    return 1000.0 * tokens / max(wait + verify, 1e-6)


def _ahead(conditions: Conditions, plan: SpeculationPlan, plain: float) -> float:
    """Every token is as guessed, or it is a miss: between two misses lie 1 / (1 − held) tokens on average."""
    held = mean_acceptance(conditions.accepted(plan))
    step_ms = max(conditions.step_ms(plan.branches), 1e-3)
    verify_ms = max(conditions.verify_ms(plan.rows), 1e-3)
    longest = plan.rows / (conditions.tree_rows if plan.branches > 1 else 1.0)
    # What the window holds is shared by the blocks under way; more than what is drafted in a step cannot be checked.
    late = math.ceil(conditions.link_ms / verify_ms)
    block = max(0.0, min(longest, (plan.gamma - 1) / (1 + late), verify_ms / step_ms - 1.0))
    run = 1.0 / (1.0 - held)
    later_steps = 1.0 / (1.0 - math.pow(held, block + 1.0))
    if plan.want:
        first = min(plan.want, longest)
        steps = 1.0 + math.pow(held, first + 1.0) * later_steps
        brings = run / (steps * verify_ms + wait_ms(conditions, plan.want, plan.branches))
    else:
        plain_ms = max(conditions.verify_ms(0), 1e-3)
        if plain_ms <= step_ms:
            return plain
        # The drafter has caught up after `behind` plain tokens, all of which it must have guessed.
        behind = max(1, math.ceil((conditions.link_ms + step_ms) / (plain_ms - step_ms)))
        missed = math.pow(max(held, 1e-3), min(behind, 64))
        alone = (1.0 - missed) / ((1.0 - held) * missed)
        first = min(longest, max(0.0, (behind * plain_ms - conditions.link_ms) / step_ms - behind))
        brings = (alone + run) / (alone * plain_ms + verify_ms * (1.0 + math.pow(held, first + 1.0) * later_steps))
    offered = conditions.offer_rate
    return offered * 1000.0 * brings + (1.0 - offered) * plain


def mean_acceptance(acceptance: Sequence[float]) -> float:
    """The one chance for all places that would accept as many in a row."""
    row = expected_tokens(acceptance, MAX_GAMMA) - 1.0
    return min(CERTAIN, row / (1.0 + row))


def plans(
    gamma_max: int, branches: Sequence[int] = (1, *BRANCHES), *, far: int | None = None
) -> Iterator[SpeculationPlan]:
    """All there is to choose from. `far`: how far a drafter ahead may guess, when not as far as its window."""
    yield PLAIN
    for width in branches:
        for gamma in range(1, gamma_max + 1):
            if width == 1 or gamma * width <= MOST_NODES:
                yield SpeculationPlan(gamma, width)
    far = window(gamma_max) if far is None else far
    for width in branches:
        if width not in (1, BRANCHES_AHEAD) and len(branches) > 1:
            continue
        for rows in ROWS_AHEAD:
            for want in (0, *WANTS):
                if gamma_max and want <= min(rows, far) and (rows <= far or rows == ROWS_AHEAD[0]):
                    yield SpeculationPlan(far, width, ahead=True, rows=rows, want=want)


def window(gamma_max: int) -> int:
    """How far a drafter ahead may guess: one block is checked while the next is made."""
    return min(MAX_GAMMA, 2 * gamma_max)


def patience_for(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Twice the expected wait: enough for jitter, and a silent drafter costs little before it is not waited for."""
    awaited = plan.want if plan.ahead else plan.gamma
    if awaited == 0:
        return 0.0
    return min(MAX_PATIENCE_MS, max(MIN_PATIENCE_MS, 2.0 * wait_ms(conditions, awaited, plan.branches)))
