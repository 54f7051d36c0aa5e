"""γ control: the choice of how a session is drafted and verified. Pure: no clocks, no I/O.

`Controller` chooses the plan with the highest expected throughput, compares the expectation with the measurement, and
probes now and then whether speculation pays again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from coordinator.control.estimator import BestDrafter, Estimator
from coordinator.control.goodput import net_throughput, paying_nodes
from coordinator.control.throughput_model import (
    BRANCHES,
    MAX_WAIT_TIMEOUT_MS,
    MIN_WAIT_TIMEOUT_MS,
    PLAIN,
    Conditions,
    Mode,
    PlanChoice,
    SpeculationPlan,
    candidate_plans,
    draft_wait_timeout_ms,
    throughput,
)
from outrider.protocol.speculation import MAX_GAMMA, Verdict, VerifySteering

RARE_SHORTFALL_RATE = 0.05  # above it a fixed γ is checked after each verdict
MAX_SHORTFALL_RATE = 0.9  # above it even a fixed γ is not waited for,
RETRY_AFTER = 16  # except for one step after this many others, doubled each time
RETRY_AFTER_MAX = 512
HYSTERESIS = 1.04  # factor by which another plan must be better to replace the present one
DECIDE_EVERY = 4  # steps between two choices, which take up to a millisecond each
DECIDE_EVERY_SETTLED = 16  # the same after a plan has held for SETTLED_AFTER steps
DECIDE_EVERY_RESTING = 64  # beside other sessions, whose steps wait for the choices of all
SETTLED_AFTER = 48
RESTS_AFTER = 12  # plain steps on shared cores
PROBE_AFTER = 16  # plain steps before the first probe
PROBE_AFTER_MAX = 192  # each probe without result doubles the pause up to this
PROBE_STEPS = 4
LONGEST_PROBE = 16  # after it the guesses are known, and what does not pay by then loses more
PROBE_GAMMA = 3
PROBE_GAMMA_WAITING = 2  # on shared cores, where every guess of a probe costs time
FIXED_WAIT_TIMEOUT_MS = 50.0  # at least, with a fixed γ: its steps should contain γ guesses
SETTLING = 3  # verdicts after a new plan that still show the previous one
COMPARE_STEPS = 16  # verdicts after which measured and expected throughput are compared
COMPARE_STEPS_SLOW = 6  # the same for a plan that is clearly slower than plain decoding
CLEARLY_SLOWER = 0.85
LONGEST_ROUND = 2.0  # plain steps by which a round lowers the credit at most: other load has delayed a longer one
READ_STEPS, READ_WAIT = 4, 1.0  # steps that wait so many plain ones longer, unpaid: the drafter reads the prompt
REFERENCE_EVERY = 48  # steps with guesses between two plain ones, which are measured


def choose_plan(
    conditions: Conditions, plans: Iterable[SpeculationPlan], current: SpeculationPlan | None = None, slack: float = 1
) -> PlanChoice:
    """Return the best plan by net throughput. The present one stays unless one is clearly better, plain by `slack`."""
    net = {plan: net_throughput(conditions, plan) for plan in plans}
    best = max(net, key=net.__getitem__)
    plain = net.get(PLAIN, 0.0)
    if current is not None and net.get(current, -1.0) * slack >= plain and net[best] < net[current] * HYSTERESIS:
        best = current
    return PlanChoice(best, draft_wait_timeout_ms(conditions, best), throughput(conditions, best))


@dataclass(slots=True)
class PlanTally:
    """Expected and measured throughput of one plan."""

    steps: int = 0
    tokens: int = 0
    ms: float = 0.0
    expected: float = 0.0  # tokens per second, summed over steps

    def add(self, tokens: int, ms: float, expected: float, steps: int = 1) -> None:
        self.steps += steps
        self.tokens += tokens
        self.ms += ms
        self.expected += steps * expected


@dataclass(frozen=True, slots=True)
class FixedChoices:
    """Settings that a request fixes, so that the coordinator does not choose them; None and empty leave the choice."""

    gamma: int | None = None
    patience_us: int | None = None
    drafter: str = ""
    branches: int | None = None
    ahead: bool | None = None


class Controller:
    """Chooser of a session's plan over time."""

    def __init__(
        self, gamma_max: int, estimator: Estimator, fixed: FixedChoices = FixedChoices(), *, single: bool = False
    ) -> None:
        """Prepare the candidate plans; `single` excludes branches, for modes in which guesses are drawn."""
        self._fixed = fixed
        self._fixed_plan = _plan_fixed_by(fixed, single=single)
        self._gamma_max = gamma_max if fixed.gamma is None else fixed.gamma
        self._allowed = [] if self._fixed_plan is not None else _allowed_plans(self._gamma_max, fixed, single=single)
        self._estimator = estimator
        self._plain_steps = self._probe_steps_left = 0
        self._probe_after = PROBE_AFTER
        self._since_choice = self._since_plan = self._since_retry = 0
        self._choice_due = True  # before the next regular choice
        self._idle = False  # plain steps on shared cores: they change little, and a choice takes the verifier's time
        self._retry_after = RETRY_AFTER
        self._measured = PlanTally()  # of the present plan, since it settled
        self._suspended = False  # until the credit is refilled
        self._since_reference = 0  # steps with guesses
        self._expected = 0.0  # of the present plan, tokens per second
        self.plan, self.wait_timeout_ms, self.paying_nodes = PLAIN, 0.0, 0
        self.tallies: dict[SpeculationPlan, PlanTally] = defaultdict(PlanTally)
        # At the last choice:
        self._conditions: Conditions | None = None
        self._candidates: list[SpeculationPlan] = []
        self._expected_plain = 0.0

    @property
    def wants_drafter(self) -> bool:
        return (self._gamma_max if self._fixed_plan is None else self._fixed_plan.gamma) > 0

    def waits_ms(self, verdict: Verdict) -> float:
        """Return how long its step may have waited for guesses: not the last one, nor the first of a new plan."""
        return 0.0 if verdict.finish_reason or not self._since_plan else self.wait_timeout_ms

    @property
    def resting(self) -> bool:
        """Return whether a drafter on the verifier's cores needs no hidden states: plain steps win for now."""
        settled = self._conditions is not None and self._conditions.shares_cores and self._since_plan >= RESTS_AFTER
        return (settled or (self._estimator.shared and self._idle)) and not self.plan.gamma

    def would_guess(self, drafter: BestDrafter) -> bool:
        """Return whether guesses of a drafter on the verifier's cores pay, as far as is known before it drafts."""
        return _pays(self._estimator.conditions(drafter), (plan for plan in self._allowed if not plan.ahead))

    def best_per_mode(self) -> list[PlanChoice]:
        """Return the best plan of every mode and its net throughput, as of the last choice."""
        best: dict[Mode, PlanChoice] = {}
        for plan in self._candidates:
            assert self._conditions is not None
            expected = net_throughput(self._conditions, plan)
            if plan.mode not in best or expected > best[plan.mode].tokens_per_s:
                best[plan.mode] = PlanChoice(plan, draft_wait_timeout_ms(self._conditions, plan), expected)
        return list(best.values())

    def observe(self, verdict: Verdict, drafter: BestDrafter | None) -> None:
        """Record a verdict under the present plan."""
        self._choice_due |= self._estimator.observe(verdict, self.plan, self.waits_ms(verdict), drafter)
        if self._probe_steps_left and verdict.accepted and self._since_plan < LONGEST_PROBE:
            self._probe_steps_left = max(self._probe_steps_left, PROBE_STEPS)
        steps, timings = verdict.steps, verdict.timings
        self._since_choice += steps
        self._since_plan += steps
        self._since_retry += steps
        ms = steps * (timings.wait_us + timings.step_us) / 1000
        self.tallies[self.plan].add(len(verdict.tokens), ms, self._expected, steps)
        if self._fixed_plan is None and self._estimator.on_shared_cores(drafter):
            reads = self._since_plan <= READ_STEPS and not self._estimator.pair.checked
            own, spent_ms = (READ_WAIT, timings.wait_us / 1000) if reads else (len(verdict.tokens), ms)
            gain = own - spent_ms * self._expected_plain / 1000.0
            self._update_credit(min(0.0, gain) if reads else gain, steps, guessed=verdict.proposed > 0)
        if self.plan.gamma and not self._probe_steps_left and self._since_plan > SETTLING and steps == 1:
            self._compare(len(verdict.tokens), ms)

    @property
    def due(self) -> bool:
        """Return whether it is time for a choice."""
        settled = self._idle or self._suspended or self._since_plan >= SETTLED_AFTER
        every = DECIDE_EVERY_SETTLED if settled else DECIDE_EVERY
        every = DECIDE_EVERY_RESTING if self.resting and self._estimator.shared else every
        short = self._estimator.shortfall_rate.value > RARE_SHORTFALL_RATE or not self.wait_timeout_ms
        now = self._choice_due or self._estimator.pair.renewed or self._probe_steps_left > 0
        return now or self._since_choice >= every or (short and self._fixed_plan is not None)

    def decide(self, drafter: BestDrafter | None) -> VerifySteering | None:
        """Return new steering for the verifier, if anything changes; `drafter` is None while none is attached."""
        choice = self._choose(drafter)
        if choice is None:
            return None
        if self._fixed.patience_us is not None and choice.plan.gamma:
            choice = replace(choice, wait_timeout_ms=self._fixed.patience_us / 1000)
        reads = self._estimator.on_shared_cores(drafter) and not self._estimator.pair.checked and choice.plan.gamma > 0
        if reads and self._expected_plain and (choice.plan != self.plan or self._since_plan < READ_STEPS):
            choice = replace(choice, wait_timeout_ms=choice.wait_timeout_ms + READ_WAIT * 1000.0 / self._expected_plain)
        self._expected = choice.tokens_per_s
        near = 0.75 * self.wait_timeout_ms <= choice.wait_timeout_ms <= 1.25 * self.wait_timeout_ms
        paying = paying_nodes(choice.plan, self.plan.gamma + self.paying_nodes) if self._estimator.shared else 0
        changed = None if paying == self.paying_nodes else paying
        if choice.plan == self.plan and near and changed is None:
            return None
        if choice.plan != self.plan:
            self._since_plan, self._measured = 0, PlanTally()
        self.plan, self.wait_timeout_ms, self.paying_nodes = choice.plan, choice.wait_timeout_ms, paying
        return replace(self.plan.for_verifier(self.wait_timeout_ms), paying_nodes=changed)

    def _choose(self, drafter: BestDrafter | None) -> PlanChoice | None:
        """Return a choice of plan, or None if it is not time for one."""
        if drafter is None:
            self._choice_due = True
            return PlanChoice(PLAIN, 0.0, 0.0)
        if not self.due:
            return None
        pair = self._estimator.pair
        self._plain_steps += DECIDE_EVERY_SETTLED if self._choice_due else self._since_choice
        self._since_choice, self._choice_due, pair.renewed = 0, False, False
        if self._fixed_plan is not None:
            return self._choose_fixed(self._estimator.conditions(drafter), self._fixed_plan)
        # Drafting ahead on the verifier's own cores slows the verifier.
        ahead = not drafter.shares_cores or self._fixed.ahead
        self._candidates = [plan for plan in self._allowed if ahead or not plan.ahead]
        self._estimator.recover(self.plan, drafter)
        self._conditions = self._estimator.conditions(drafter)
        return self._choose_adaptive(self._conditions)

    def _choose_fixed(self, conditions: Conditions, plan: SpeculationPlan) -> PlanChoice:
        if conditions.shortfall_rate < MAX_SHORTFALL_RATE:
            self._since_retry, self._retry_after = 0, RETRY_AFTER
        elif self._since_retry < self._retry_after:
            return PlanChoice(plan, MIN_WAIT_TIMEOUT_MS, throughput(conditions, plan))
        else:
            self._since_retry, self._retry_after = 0, min(RETRY_AFTER_MAX, 2 * self._retry_after)
        timeout_ms = max(FIXED_WAIT_TIMEOUT_MS, 4.0 * draft_wait_timeout_ms(conditions, plan)) if plan.gamma else 0.0
        return PlanChoice(plan, min(timeout_ms, MAX_WAIT_TIMEOUT_MS), throughput(conditions, plan))

    def _choose_adaptive(self, conditions: Conditions) -> PlanChoice:
        self._expected_plain = throughput(conditions, PLAIN)
        if (conditions.shares_cores and not self._fixed.ahead) and (
            self._suspended or not self._estimator.plain_known or self._since_reference >= REFERENCE_EVERY
        ):
            return PlanChoice(PLAIN, 0.0, self._expected_plain)
        alone, pair = conditions.shares_cores and not conditions.shared, self._estimator.pair
        slack = HYSTERESIS if alone and pair.credit > pair.least_credit else 1.0  # others have no part in the credit
        choice = choose_plan(conditions, self._candidates, self.plan if self.plan in self._candidates else PLAIN, slack)
        self._idle = conditions.shares_cores and not choice.plan.gamma
        if choice.plan.gamma:
            self._plain_steps = self._probe_steps_left = 0
            self._probe_after = PROBE_AFTER
            return choice
        probing = 0.0 if self._probe_steps_left else self._estimator.pair.least_credit
        least = math.inf if conditions.shared and not self._fixed.ahead else probing  # a probe would slow all sessions
        if conditions.shares_cores and self._estimator.pair.credit < least:
            self._probe_steps_left = 0
            return choice
        return self._probe(conditions) or choice

    def _update_credit(self, gain: float, steps: int, *, guessed: bool) -> None:
        """Record what steps gained over plain decoding, in plain steps; suspend speculation without credit."""
        suspended, referred = self._suspended, self._since_reference >= REFERENCE_EVERY
        pair = self._estimator.pair
        if self.plan.gamma:
            self._since_reference += 1
            pair.gain(max(gain, -LONGEST_ROUND))
        else:
            self._since_reference *= guessed  # by the plan before: no plain step was measured yet
            pair.credit = max(pair.credit, min(pair.least_credit, pair.credit + steps * pair.refill))
        self._suspended = pair.credit <= 0.0 or (suspended and pair.credit < pair.least_credit)
        if suspended != self._suspended or referred or self._since_reference >= REFERENCE_EVERY:
            self._choice_due = True

    def _probe(self, conditions: Conditions) -> PlanChoice | None:
        """Return now and then, while plain decoding wins, a plan that checks a few guesses."""
        # Number of plain steps that pass before a guess arrives, unless these wait for it: it must reach beyond them.
        late = min(MAX_GAMMA, math.ceil(conditions.network_ms / max(conditions.verify_ms(0), 1e-3)))
        gamma = PROBE_GAMMA_WAITING if conditions.shares_cores else PROBE_GAMMA + late
        if self._probe_steps_left:
            self._probe_steps_left -= 1
            if self._probe_steps_left == 0:
                self._probe_after = min(PROBE_AFTER_MAX, 2 * self._probe_after)
        else:
            if self._plain_steps < self._probe_after or not _could_pay(conditions, self._candidates):
                return None
            self._plain_steps = 0
            self._probe_steps_left = PROBE_STEPS + late
        ahead = self._fixed.ahead is not False and (not conditions.shares_cores or bool(self._fixed.ahead))
        plan = SpeculationPlan(min(gamma, self._gamma_max), ahead=ahead)
        # On shared cores, steps beside the drafter would be slower than plain ones: they wait for it.
        timeout_ms = draft_wait_timeout_ms(conditions, plan) if conditions.shares_cores else 0.0
        return PlanChoice(plan, timeout_ms, throughput(conditions, PLAIN))

    def _compare(self, tokens: int, ms: float) -> None:
        """Compare measured and expected throughput of the plan's mode, over several steps."""
        if self.paying_nodes:
            return  # what the other sessions leave of a step says nothing of the mode
        mode, measured, ratios = self.plan.mode, self._measured, self._estimator.pair.ratios
        measured.add(tokens, ms, self._expected / ratios.by_mode().get(mode, 1.0))
        if measured.steps < COMPARE_STEPS_SLOW or measured.ms <= 0.0 or measured.expected <= 0.0:
            return
        tokens_per_s = 1000.0 * measured.tokens / measured.ms
        if tokens_per_s < CLEARLY_SLOWER * self._expected_plain:
            self._choice_due = True
        elif measured.steps < COMPARE_STEPS:
            return
        ratios.add(mode, tokens_per_s / (measured.expected / measured.steps))
        self._measured = PlanTally()


def _could_pay(conditions: Conditions, candidates: Iterable[SpeculationPlan]) -> bool:
    """Return whether a plan would beat plain decoding if every guess were accepted: else a probe changes nothing."""
    perfect = conditions._replace(acceptance=(1.0,), proposal_rate=1.0, timeout_rate=0.0, throughput_ratios={})
    if not conditions.shares_cores:  # where no step waits for them, probes measure drafts anew: one may have stalled
        perfect = perfect._replace(draft_ms=0.0, level_ms=None)
    return _pays(perfect, candidates)


def _pays(conditions: Conditions, candidates: Iterable[SpeculationPlan]) -> bool:
    plain = net_throughput(conditions, PLAIN)
    return any(net_throughput(conditions, plan) > plain for plan in candidates if plan.gamma)


def _plan_fixed_by(fixed: FixedChoices, *, single: bool) -> SpeculationPlan | None:
    if fixed.gamma == 0:
        return PLAIN
    if fixed.gamma is None or fixed.ahead:
        return None  # ahead, budget and awaited guesses remain to be chosen
    return SpeculationPlan(fixed.gamma, 1 if single else fixed.branches or 1)


def _allowed_plans(gamma_max: int, fixed: FixedChoices, *, single: bool) -> list[SpeculationPlan]:
    widths = [1, *BRANCHES] if fixed.gamma is None else [1]
    if single or fixed.branches is not None:
        widths = [1 if single else fixed.branches or 1]
    plans = candidate_plans(gamma_max, widths, gamma_ahead=gamma_max if fixed.gamma is not None else None)
    guessing = [plan for plan in plans if plan.gamma and fixed.ahead in (None, plan.ahead)]
    return [PLAIN, *guessing] if fixed.gamma is None else guessing
