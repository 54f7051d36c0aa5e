"""γ control: how a session is drafted and verified, learnt from its verdicts.

Pure: no clocks, no I/O. `Estimator` turns verdicts and guesses into the
quantities that `throughput_model` works with; `Controller` chooses the plan that
promises the most tokens per second, compares what it promised with what came
of it, and now and then looks whether guessing pays again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from coordinator.control.throughput_model import (
    BRANCHES,
    MAX_PATIENCE_MS,
    MIN_PATIENCE_MS,
    PLAIN,
    Conditions,
    Mode,
    PlanChoice,
    SpeculationPlan,
    expected_tokens,
    patience_for,
    plans,
    rate,
    worth,
)
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.speculation import MAX_GAMMA, Steering, TokenKind, Verdict

PRIOR_ACCEPTANCE = 0.6
PRIOR_TRIALS = 4.0
PRIOR_GAIN = 0.4  # of the guesses that fail, how many have the truth beside them where there are three
PRIOR_GAIN_TRIALS = 10.0
PRIOR_TREE_ROWS = 2.0
DECAY = 0.98  # of what a trial weighs, per step with guesses
SMOOTHING = 0.15
SILENCE_SMOOTHING = 0.4  # a drafter that says nothing at all is dear
SILENT = 0.9  # of patience
GIVEN_UP = 0.9  # of the waits for less than was asked for: with a fixed γ, too, nobody is waited for then,
LOOK_AFTER = 16  # but for one step after so many, each time after twice as many
LOOK_AT_MOST = 512
HYSTERESIS = 1.04  # another plan must promise this much more before it is taken
DECIDE_EVERY = 4  # verdicts between two choices,
DECIDE_SELDOM = 16  # once a plan has stood for
STEADY = 48  # verdicts: a choice takes about a millisecond
PROBE_AFTER = 16  # plain steps before a first look at whether guessing would pay by now
PROBE_AT_MOST = 192  # plain steps between looks: each that shows nothing doubles the pause
PROBE_STEPS = 4
PROBE_GAMMA = 3
FIXED_PATIENCE_MS = 50.0  # a fixed γ is meant: wait generously, so that it is what happens
MAX_FITTED_ROWS = 256  # steps beyond this carry prompts, on another line
PRIOR_ROW_SHARE = 0.04  # of a step's cost, that one more row adds, before it is known better
SETTLING = 3  # verdicts after a new plan that still show the old one
PACE_STEPS = 16  # verdicts after which what came is compared with what was promised
SOON_STEPS = 6  # or after so many, where it is clearly slower than plain
CLEARLY = 0.85
PACE_SMOOTHING = 0.2  # the first looks weigh more
KNOWN_LOOKS = 3  # what a pace of earlier sessions counts for
PACE_FORGETTING = 0.02  # per choice, of the ways that are not taken: a bad spell is no verdict for ever
PACE_BOUNDS = (0.3, 1.5)


def choose(
    conditions: Conditions, candidates: Iterable[SpeculationPlan], current: SpeculationPlan | None = None
) -> PlanChoice:
    """The plan that is worth most; the current one unless another is clearly better. What is worth less than plain is
    never kept."""
    worths = {plan: worth(conditions, plan) for plan in candidates}
    best = max(worths, key=worths.__getitem__)
    plain = worths.get(PLAIN, 0.0)
    if current is not None and worths.get(current, -1.0) >= plain and worths[best] < worths[current] * HYSTERESIS:
        best = current
    return PlanChoice(best, patience_for(conditions, best), rate(conditions, best))


@dataclass(slots=True)
class CostLine:
    """Step time as a line in the number of rows, fitted with exponential forgetting and held to a sane slope.

    For verifiers that publish no curve.
    """

    weight: float = 0.0
    rows: float = 0.0
    ms: float = 0.0
    rows_rows: float = 0.0
    rows_ms: float = 0.0

    def add(self, rows: float, ms: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("rows", rows),
            ("ms", ms),
            ("rows_rows", rows**2),
            ("rows_ms", rows * ms),
        ):
            setattr(self, name, getattr(self, name) * (1 - SMOOTHING / 2) + value)

    def fit(self) -> tuple[float, float]:
        """Milliseconds for one row, and for each further one."""
        if self.weight == 0.0:
            return 0.0, 0.0
        mean_rows, mean_ms = self.rows / self.weight, self.ms / self.weight
        prior = mean_ms * PRIOR_ROW_SHARE
        spread = self.rows_rows / self.weight - mean_rows**2
        covariance = self.rows_ms / self.weight - mean_rows * mean_ms
        slope = (covariance + prior) / (spread + 1.0)
        slope = min(max(slope, 0.0), mean_ms / max(mean_rows, 1.0))
        return mean_ms - slope * (mean_rows - 1.0), slope


@dataclass(slots=True)
class PairHistory:
    """What a target and a drafter have shown together: where a new session starts from."""

    acceptance: list[float] = field(default_factory=list)
    offer_rate: float = 1.0
    draft_ms: float = 0.0
    tree_gain: float = PRIOR_GAIN
    ahead_gain: float = PRIOR_GAIN
    tree_rows: float = PRIOR_TREE_ROWS
    level_ms: float = 0.0
    paces: dict[str, float] = field(default_factory=dict)  # of each way, against what was expected of it


@dataclass(slots=True)
class HitRate:
    """How often something held, lately."""

    held: float
    trials: float = PRIOR_GAIN_TRIALS

    def __post_init__(self) -> None:
        self.held *= self.trials

    def add(self, *, held: bool) -> None:
        self.trials = self.trials * DECAY + 1.0
        self.held = self.held * DECAY + held

    @property
    def mean(self) -> float:
        return self.held / self.trials


class PairEstimate:
    """What guesses show in this session, begun from what target and drafter have shown together before."""

    def __init__(self, positions: int) -> None:
        self._positions = max(1, positions)
        self.start_from(PairHistory())

    def start_from(self, history: PairHistory) -> None:
        self._history = history
        self._held = [0.0] * self._positions
        self._trials = [0.0] * self._positions
        self._prior_weight = [PRIOR_TRIALS] * self._positions
        self._beside = HitRate(history.tree_gain)
        self._at_hand = HitRate(history.ahead_gain)
        self.seen = 0  # steps with guesses
        self.offer_rate = history.offer_rate
        self.draft_ms = history.draft_ms
        self.level_ms = history.level_ms
        self.tree_rows = history.tree_rows
        self.paces = {Mode(way): pace for way, pace in history.paces.items()}

    def drafted(self, tokens: int, draft_us: int, *, tree: bool = False) -> None:
        """A guess arrived, so deep."""
        if not tokens or not draft_us:
            return  # what goes out in several messages has its time on the first
        taken = draft_us / 1000 / tokens
        if tree:
            self.level_ms = _smooth(self.level_ms, taken) if self.level_ms else taken
        else:
            self.draft_ms = _smooth(self.draft_ms, taken)

    def judged(self, offered: int, accepted: int, *, due: bool, beside: int = 0) -> None:
        """A verdict arrived; `due`: guesses were to be there. `beside`: accepted ones that were not the first for their
        place."""
        if due:
            self.offer_rate = _smooth(self.offer_rate, 1.0 if offered else 0.0)
        self.seen += offered > 0
        for i in range(min(accepted + 1, offered, len(self._trials))):
            # Which of the accepted stood beside is not said: the last, for what follows them is drafted last.
            self._trial(i, held=i < accepted - beside)

    def late(self, *, held: bool) -> None:
        """A guess arrived for what was committed meanwhile. No verdict tells of those that failed: without them, only
        the lucky ones would be seen where nobody waits."""
        self._trial(0, held=held)

    def _trial(self, place: int, *, held: bool) -> None:
        self._prior_weight[place] *= DECAY
        self._trials[place] = self._trials[place] * DECAY + 1.0
        self._held[place] = self._held[place] * DECAY + held

    def branched(self, verdict: Verdict, *, ahead: bool) -> None:
        """A tree was checked: what its runners-up were good for."""
        missed = verdict.last is TokenKind.RECOVERED
        share = self._at_hand if ahead else self._beside
        for _ in range(verdict.beside):
            share.add(held=True)
        if missed:
            share.add(held=ahead and verdict.left > 0)
        if verdict.offered:
            self.tree_rows = _smooth(self.tree_rows, max(1.0, verdict.nodes / verdict.offered))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Per position what was seen, shrunk towards what the pair has shown there before; where it has not, towards
        the position before: a place that was never tried is judged by its neighbour."""
        shown = self._history.acceptance
        found: list[float] = []
        for i, (held, trials, weight) in enumerate(zip(self._held, self._trials, self._prior_weight, strict=True)):
            before = found[-1] if found else PRIOR_ACCEPTANCE
            prior = shown[i] if i < len(shown) else before
            found.append((held + weight * prior) / (trials + weight))
        return tuple(found)

    @property
    def tree_gain(self) -> float:
        return self._beside.mean

    @property
    def ahead_gain(self) -> float:
        return self._at_hand.mean

    @property
    def length(self) -> float:
        """Accepted tokens to expect of as long a guess as there may be."""
        return expected_tokens(self.acceptance, self._positions) - 1.0

    def history(self) -> PairHistory:
        return PairHistory(
            acceptance=list(self.acceptance),
            offer_rate=self.offer_rate,
            draft_ms=self.draft_ms,
            tree_gain=self.tree_gain,
            ahead_gain=self.ahead_gain,
            tree_rows=self.tree_rows,
            level_ms=self.level_ms,
            paces={way.value: pace for way, pace in self.paces.items()},
        )


class Estimator:
    """One session's view of its conditions, learnt from verdicts and guesses. `pair` is all its drafters together."""

    def __init__(self, positions: int) -> None:
        self.pair = PairEstimate(positions)
        self._link_ms: float | None = None
        self._silence = 0.0
        self.unmet = 0.0  # share of the waits that ended with patience and with less than was asked for
        self._cost = CostLine()
        self._published = UNKNOWN_COST
        self._pace: float | None = None  # steps seen, against what was published
        self._other_rows = 0.0  # of the sessions that share our steps
        self._others = 0.0  # how many these are
        self._other_rate = 0.0  # their tokens, per millisecond of a step
        self._steps = 0  # on this verifier

    def priced(self, published: CostCurve, sessions: int = 0) -> None:
        """A verifier was attached, and says what its steps take and how many sessions it has."""
        self._published = published
        self._pace = None
        self._steps = 0
        self._others = self._other_rows = float(sessions)
        self._other_rate = sessions / max(1e-6, published.at(sessions + 1)) if published.rows else 0.0

    def judged(self, verdict: Verdict, *, plan: SpeculationPlan, patience_ms: float) -> bool:
        """A verdict arrived under this plan; whether its step was waited for in vain."""
        waited = patience_ms > 0
        timings = verdict.timings
        if timings.rows <= MAX_FITTED_ROWS:
            step_ms = timings.step_us / 1000
            self._cost.add(timings.rows, step_ms)
            if self._published.rows:
                pace = step_ms / self._published.at(timings.rows)
                self._pace = pace if self._pace is None else _smooth(self._pace, pace)
            self._shared(verdict, step_ms)
        tree, asked = plan.branches > 1, plan.gamma > 0
        due = asked and (waited or verdict.offered > 0)
        self.pair.judged(verdict.offered, verdict.accepted, due=due, beside=verdict.beside)
        if tree:
            self.pair.branched(verdict, ahead=plan.ahead)
        if asked and waited and not plan.ahead:
            drafting = verdict.offered * (self.pair.level_ms if tree else self.pair.draft_ms)
            link = max(0.0, timings.wait_us / 1000 - drafting)
            self._link_ms = link if self._link_ms is None else _smooth(self._link_ms, link)
        to_the_end = waited and timings.wait_us / 1000 >= SILENT * patience_ms
        in_vain = to_the_end and not verdict.offered
        if in_vain or verdict.offered:
            self._silence += SILENCE_SMOOTHING * (in_vain - self._silence)
        if waited:  # an honest drafter that has less than it was asked for says so, and is not waited for
            self.unmet += SILENCE_SMOOTHING * ((to_the_end and verdict.offered < plan.gamma) - self.unmet)
        return in_vain

    def _shared(self, verdict: Verdict, step_ms: float) -> None:
        """Who was in a step beside us. The first steps weigh more: others may have begun with us."""
        self._steps += 1
        weight = max(SMOOTHING, 1.0 / (1 + self._steps))
        timings = verdict.timings
        tokens = max(0, timings.step_tokens - len(verdict.tokens))
        self._other_rows = _smooth(self._other_rows, timings.rows - timings.session_rows, weight)
        self._others = _smooth(self._others, timings.sessions - 1, weight)
        self._other_rate = _smooth(self._other_rate, tokens / step_ms if step_ms else 0.0, weight)

    def conditions(self, round_trips_ms: float) -> Conditions:
        """`round_trips_ms`: to the drafter and to the verifier together, until waits have been seen."""
        return Conditions(
            acceptance=self.pair.acceptance,
            offer_rate=self.pair.offer_rate,
            draft_ms=self.pair.draft_ms,
            link_ms=self._link_ms if self._link_ms is not None else round_trips_ms,
            cost=self._curve(),
            other_rows=self._other_rows,
            others=self._others,
            other_rate=self._other_rate,
            tree_gain=self.pair.tree_gain,
            ahead_gain=self.pair.ahead_gain,
            tree_rows=self.pair.tree_rows,
            level_ms=self.pair.level_ms or None,
            silence=self._silence,
            paces=self.pair.paces,
        )

    def _curve(self) -> CostCurve:
        """What the verifier published, at the pace of our own steps; without that, a line through them."""
        if self._published.rows:
            return self._published.scaled(self._pace or 1.0)
        return CostCurve.line(*self._cost.fit())


@dataclass(slots=True)
class PlanTally:
    """What one plan was expected to bring, and what it brought."""

    steps: int = 0
    tokens: int = 0
    ms: float = 0.0
    expected: float = 0.0  # tokens per second, summed over steps

    def add(self, tokens: int, ms: float, expected: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.ms += ms
        self.expected += expected


@dataclass(frozen=True, slots=True)
class FixedChoices:
    """What is not for the controller to choose."""

    gamma: int | None = None
    patience_us: int | None = None
    branches: int | None = None
    ahead: bool | None = None


class Controller:
    """The plan of one session over time: `choose`, and now and then a look at whether guessing pays again."""

    def __init__(
        self, gamma_max: int, estimator: Estimator, wishes: FixedChoices = FixedChoices(), *, single: bool = False
    ) -> None:
        """`single`: guesses are drawn, not chosen, and have no siblings."""
        self._wishes = wishes
        self._fixed = self._plan_wished(wishes, single=single)
        self._gamma_max = gamma_max if wishes.gamma is None else wishes.gamma
        self._candidates = [] if self._fixed is not None else self._allowed(self._gamma_max, wishes, single=single)
        self._plain_steps = 0
        self._pause = PROBE_AFTER
        self._probing = 0
        self._since_choice = DECIDE_SELDOM
        self._since_plan = 0
        self._since_look = 0  # at whether a drafter that was waited for in vain comes by now
        self._look_after = LOOK_AFTER
        self._seen = PlanTally()  # of the plan in force, since it settled
        self._expected = 0.0  # of the plan in force, tokens per second
        self._plain_rate = 0.0  # expected, when last chosen
        self._looks: dict[Mode, int] = {}  # at what a way brings
        self.estimator = estimator
        self.plan = PLAIN
        self.patience_ms = 0.0
        self.tallies: dict[SpeculationPlan, PlanTally] = {}
        self._conditions: Conditions | None = None  # when last chosen
        self.shared = False  # drafter and verifier run on the same cores: who drafts ahead slows the other

    @property
    def wants_drafter(self) -> bool:
        return (self._gamma_max if self._fixed is None else self._fixed.gamma) > 0

    def considered(self) -> list[PlanChoice]:
        """The best plan of every way and what it is worth, as things stood when last chosen."""
        best: dict[Mode, PlanChoice] = {}
        for plan in self._apart() if self._conditions is not None else ():
            assert self._conditions is not None
            promised = worth(self._conditions, plan)
            if plan.way not in best or promised > best[plan.way].tokens_per_s:
                best[plan.way] = PlanChoice(plan, patience_for(self._conditions, plan), promised)
        return list(best.values())

    def judged(self, verdict: Verdict) -> None:
        if self.estimator.judged(verdict, plan=self.plan, patience_ms=self.patience_ms):
            self._since_choice = DECIDE_SELDOM  # that must not go on
        if self._probing and verdict.accepted:
            self._probing += PROBE_STEPS  # promising: look on
        self._since_choice += 1
        self._since_plan += 1
        self._since_look += 1
        timings = verdict.timings
        ms = (timings.wait_us + timings.step_us) / 1000
        self.tallies.setdefault(self.plan, PlanTally()).add(len(verdict.tokens), ms, self._expected)
        if self.plan.gamma and not self._probing and self._since_plan > SETTLING:
            self._compare(len(verdict.tokens), ms)

    def decide(self, round_trips_ms: float, *, attached: bool) -> Steering | None:
        """What to steer the verifier to now, if anything changes; drafters follow `plan`."""
        if not attached:
            choice = PlanChoice(PLAIN, 0.0, 0.0)
            self._since_choice = DECIDE_SELDOM
        elif self._fixed is not None:
            choice = self._as_wished(round_trips_ms, self._fixed)
        elif self._since_choice < (DECIDE_EVERY if self._since_plan < STEADY else DECIDE_SELDOM) and not self._probing:
            return None
        else:
            self._plain_steps += self._since_choice
            self._since_choice = 0
            choice = self._next(round_trips_ms)
        if self._wishes.patience_us is not None and choice.plan.gamma:
            choice = PlanChoice(choice.plan, self._wishes.patience_us / 1000, choice.tokens_per_s)
        self._expected = choice.tokens_per_s
        if choice.plan == self.plan and 0.75 * self.patience_ms <= choice.patience_ms <= 1.25 * self.patience_ms:
            return None
        if choice.plan != self.plan:
            self._since_plan = 0
            self._seen = PlanTally()
        self.plan, self.patience_ms = choice.plan, choice.patience_ms
        return self.plan.for_verifier(self.patience_ms)

    def _as_wished(self, round_trips_ms: float, plan: SpeculationPlan) -> PlanChoice:
        conditions = self.estimator.conditions(round_trips_ms)
        if self.estimator.unmet < GIVEN_UP:
            self._since_look, self._look_after = 0, LOOK_AFTER
        elif self._since_look < self._look_after:
            return PlanChoice(plan, MIN_PATIENCE_MS, rate(conditions, plan))
        else:
            self._since_look, self._look_after = 0, min(LOOK_AT_MOST, 2 * self._look_after)
        patience = (
            max(FIXED_PATIENCE_MS, 4.0 * patience_for(conditions, plan)) if plan.gamma and not plan.ahead else 0.0
        )
        return PlanChoice(plan, min(patience, MAX_PATIENCE_MS), rate(conditions, plan))

    def _next(self, round_trips_ms: float) -> PlanChoice:
        conditions = self._conditions = self.estimator.conditions(round_trips_ms)
        self._forgive()
        self._plain_rate = rate(conditions, PLAIN)
        candidates = self._apart()
        choice = choose(conditions, candidates, self.plan if self.plan in candidates else PLAIN)
        if choice.plan.gamma:
            self._plain_steps = self._probing = 0
            self._pause = PROBE_AFTER
            return choice
        return self._look(conditions) or choice

    def _apart(self) -> list[SpeculationPlan]:
        """What there is to choose from, on one machine or on several."""
        if not self.shared or self._wishes.ahead:
            return self._candidates
        return [plan for plan in self._candidates if not plan.ahead]

    def _forgive(self) -> None:
        paces = self.estimator.pair.paces
        for way in paces:
            if way is not self.plan.way:
                paces[way] += PACE_FORGETTING * (1.0 - paces[way])

    def _look(self, conditions: Conditions) -> PlanChoice | None:
        """While plain wins: now and then take guesses if they come, without waiting for them."""
        # Plain steps that pass before a guess is there: it must reach beyond them.
        late = min(MAX_GAMMA, math.ceil(conditions.link_ms / max(conditions.verify_ms(0), 1e-3)))
        if self._probing:
            self._probing -= 1
            if self._probing == 0:
                self._pause = min(PROBE_AT_MOST, 2 * self._pause)
        else:
            if self._plain_steps < self._pause or not self._could_pay(conditions):
                return None
            self._plain_steps = 0
            self._probing = PROBE_STEPS + late
        gamma = min(PROBE_GAMMA + late, self._gamma_max)
        return PlanChoice(SpeculationPlan(gamma, ahead=self._wishes.ahead is not False), 0.0, rate(conditions, PLAIN))

    def _could_pay(self, conditions: Conditions) -> bool:
        """Whether any plan would be worth more than plain if its guesses always held: where rows are dear, a look at
        them is dear as well, and in vain."""
        sure = replace(conditions, acceptance=(1.0,), offer_rate=1.0, silence=0.0, paces={})
        plain = worth(sure, PLAIN)
        return any(worth(sure, plan) > plain for plan in self._apart() if plan.gamma)

    def _compare(self, tokens: int, ms: float) -> None:
        """Over some steps: what the plan brought, against what was expected of its way with nothing known of it."""
        way, pace = self.plan.way, self.estimator.pair.paces.get(self.plan.way, 1.0)
        self._seen.add(tokens, ms, self._expected / pace)
        if self._seen.steps < SOON_STEPS or self._seen.ms <= 0.0 or self._seen.expected <= 0.0:
            return
        brought = 1000.0 * self._seen.tokens / self._seen.ms
        if brought < CLEARLY * self._plain_rate:
            self._since_choice = DECIDE_SELDOM  # that must not go on
        elif self._seen.steps < PACE_STEPS:
            return
        found = brought / (self._seen.expected / self._seen.steps)
        low, high = PACE_BOUNDS
        looks = self._looks.get(way, KNOWN_LOOKS if way in self.estimator.pair.paces else 0)
        self._looks[way] = looks + 1
        weight = max(PACE_SMOOTHING, 1.0 / (2 + looks))
        self.estimator.pair.paces[way] = pace + weight * (min(high, max(low, found)) - pace)
        self._seen = PlanTally()

    @staticmethod
    def _plan_wished(wishes: FixedChoices, *, single: bool) -> SpeculationPlan | None:
        if wishes.gamma == 0:
            return PLAIN
        if wishes.gamma is None or wishes.ahead:
            return None  # ahead, what a step takes and waits for remains to be chosen
        return SpeculationPlan(wishes.gamma, 1 if single else wishes.branches or 1)

    @staticmethod
    def _allowed(gamma_max: int, wishes: FixedChoices, *, single: bool) -> list[SpeculationPlan]:
        if single:
            widths = [1]
        elif wishes.branches is not None:
            widths = [wishes.branches]
        else:
            widths = [1, *BRANCHES] if wishes.gamma is None else [1]
        return [
            plan
            for plan in plans(gamma_max, widths, far=gamma_max if wishes.gamma is not None else None)
            if (plan.gamma == 0 and wishes.gamma is None)
            or (plan.gamma and (wishes.ahead is None or plan.ahead == wishes.ahead))
        ]


def _smooth(old: float, new: float, weight: float = SMOOTHING) -> float:
    return old + weight * (new - old)
