"""γ control: how far ahead to guess, and how long the verifier should wait for it.

Pure: no clocks, no I/O. `choose` maximises the expected committed tokens per
second over γ from 0 (plain decoding) to the largest allowed; `Estimator`
turns verdicts into the quantities that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.messages import MAX_GAMMA, UNKNOWN_COST, CostCurve, Steering, Verdict

PRIOR_ACCEPTANCE = 0.6
PRIOR_TRIALS = 4.0
DECAY = 0.96  # of what a trial weighs, per step with guesses
SMOOTHING = 0.15
HYSTERESIS = 1.04  # another γ must promise this much more before it is taken
PROBE_AFTER = 16  # plain steps before a first look at whether guessing would pay by now
PROBE_AT_MOST = 192  # plain steps between looks: each that shows nothing doubles the pause
PROBE_STEPS = 4
PROBE_GAMMA = 3
MIN_PATIENCE_MS = 2.0
MAX_PATIENCE_MS = 1_000.0
MAX_FITTED_ROWS = 256  # steps beyond this carry prompts, on another line
PRIOR_ROW_SHARE = 0.04  # of a step's cost, that one more row adds, before it is known better


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a choice depends on. Times in milliseconds."""

    acceptance: tuple[float, ...]  # chance that guess i holds, given that those before it did
    offer_rate: float  # share of steps for which the drafter has a guess at all
    draft_ms: float  # per guessed token
    link_ms: float  # from a verdict to the guess that follows it, drafting aside: both round trips
    cost: CostCurve  # of a verifier's step, by its rows
    other_rows: float = 0.0  # of the sessions that share our steps
    guess_rows: float = 1.0  # per guess of the longest path: more where paths branch

    def verify_ms(self, guesses: float) -> float:
        """A step that checks so many guesses of ours, one after the other."""
        return self.cost.at(self.other_rows + 1.0 + guesses * self.guess_rows)


@dataclass(frozen=True, slots=True)
class Choice:
    gamma: int
    patience_ms: float
    tokens_per_s: float  # expected

    def steering(self) -> Steering:
        return Steering(gamma=self.gamma, patience_us=int(self.patience_ms * 1000))


def expected_tokens(acceptance: Sequence[float], gamma: int) -> float:
    """Tokens that a step with γ guesses commits on average: the target's own and what holds before it."""
    total, reached = 1.0, 1.0
    for i in range(gamma):
        reached *= acceptance[min(i, len(acceptance) - 1)]
        total += reached
    return total


def wait_ms(conditions: Conditions, gamma: int) -> float:
    """From a verdict until γ new guesses are at the verifier."""
    return conditions.link_ms + gamma * conditions.draft_ms


def rate(conditions: Conditions, gamma: int) -> float:
    """Expected tokens per second with γ guesses per step."""
    if gamma == 0:
        return 1000.0 / max(conditions.verify_ms(0), 1e-6)
    offered = conditions.offer_rate
    tokens = offered * expected_tokens(conditions.acceptance, gamma) + (1.0 - offered)
    # A drafter without a guess says so after one link's time.
    wait = offered * wait_ms(conditions, gamma) + (1.0 - offered) * conditions.link_ms
    verify = offered * conditions.verify_ms(gamma) + (1.0 - offered) * conditions.verify_ms(0)
    return 1000.0 * tokens / max(wait + verify, 1e-6)


def choose(conditions: Conditions, gamma_max: int, current: int | None = None) -> Choice:
    """The best γ; the current one unless another is clearly better. What is slower than plain is never kept."""
    rates = [rate(conditions, gamma) for gamma in range(gamma_max + 1)]
    best = max(range(gamma_max + 1), key=rates.__getitem__)
    kept = current is not None and current <= gamma_max and rates[current] >= rates[0]
    if current is not None and kept and rates[best] < rates[current] * HYSTERESIS:
        best = current
    return Choice(best, patience_for(conditions, best), rates[best])


def patience_for(conditions: Conditions, gamma: int) -> float:
    """Twice the expected wait: enough for jitter, and a silent drafter costs little before γ falls to 0."""
    if gamma == 0:
        return 0.0
    return min(MAX_PATIENCE_MS, max(MIN_PATIENCE_MS, 2.0 * wait_ms(conditions, gamma)))


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


class Pair:
    """What guesses show in this session, begun from what target and drafter have shown together before."""

    def __init__(self, positions: int) -> None:
        self._positions = max(1, positions)
        self.start_from(PairHistory())

    def start_from(self, history: PairHistory) -> None:
        self._history = history
        self._held = [0.0] * self._positions
        self._trials = [0.0] * self._positions
        self._prior_weight = [PRIOR_TRIALS] * self._positions
        self.seen = 0  # steps with guesses
        self.offer_rate = history.offer_rate
        self.draft_ms = history.draft_ms

    def drafted(self, tokens: int, draft_us: int) -> None:
        """A guess arrived."""
        if tokens:
            self.draft_ms = _smooth(self.draft_ms, draft_us / 1000 / tokens)

    def judged(self, offered: int, accepted: int, *, due: bool) -> None:
        """A verdict arrived; `due`: guesses were to be there."""
        if due:
            self.offer_rate = _smooth(self.offer_rate, 1.0 if offered else 0.0)
        self.seen += offered > 0
        for i in range(min(accepted + 1, offered, len(self._trials))):
            self._prior_weight[i] *= DECAY
            self._trials[i] = self._trials[i] * DECAY + 1.0
            self._held[i] = self._held[i] * DECAY + (1.0 if i < accepted else 0.0)

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
    def length(self) -> float:
        """Accepted tokens to expect of as long a guess as there may be."""
        return expected_tokens(self.acceptance, self._positions) - 1.0

    def history(self) -> PairHistory:
        return PairHistory(list(self.acceptance), self.offer_rate, self.draft_ms)


class Estimator:
    """One session's view of its conditions, learnt from verdicts and guesses. `pair` is all its drafters together."""

    def __init__(self, positions: int) -> None:
        self.pair = Pair(positions)
        self._link_ms: float | None = None
        self._cost = CostLine()
        self._published = UNKNOWN_COST
        self._pace: float | None = None  # steps seen, against what was published
        self._other_rows = 0.0  # of the sessions that share our steps
        self._guess_rows = 1.0  # per guess of the longest path: more where paths branch

    def priced(self, published: CostCurve) -> None:
        """A verifier was attached, and says what its steps take."""
        self._published = published
        self._pace = None

    def judged(self, verdict: Verdict, *, asked: int, waited: bool) -> None:
        """A verdict arrived. `asked` is the γ in force, `waited` whether the verifier was to wait for guesses."""
        timings = verdict.timings
        if timings.rows <= MAX_FITTED_ROWS:
            step_ms = timings.step_us / 1000
            self._cost.add(timings.rows, step_ms)
            if self._published.rows:
                pace = step_ms / self._published.at(timings.rows)
                self._pace = pace if self._pace is None else _smooth(self._pace, pace)
            self._other_rows = _smooth(self._other_rows, timings.rows - timings.session_rows)
        self.pair.judged(verdict.offered, verdict.accepted, due=asked > 0 and (waited or verdict.offered > 0))
        if verdict.offered:
            self._guess_rows = _smooth(self._guess_rows, max(1.0, verdict.nodes / verdict.offered))
        if asked and waited:
            drafting = verdict.offered * self.pair.draft_ms
            link = max(0.0, timings.wait_us / 1000 - drafting)
            self._link_ms = link if self._link_ms is None else _smooth(self._link_ms, link)

    def conditions(self, round_trips_ms: float) -> Conditions:
        """`round_trips_ms`: to the drafter and to the verifier together, until waits have been seen."""
        return Conditions(
            acceptance=self.pair.acceptance,
            offer_rate=self.pair.offer_rate,
            draft_ms=self.pair.draft_ms,
            link_ms=self._link_ms if self._link_ms is not None else round_trips_ms,
            cost=self._curve(),
            other_rows=self._other_rows,
            guess_rows=self._guess_rows,
        )

    def _curve(self) -> CostCurve:
        """What the verifier published, at the pace of our own steps; without that, a line through them."""
        if self._published.rows:
            return self._published.scaled(self._pace or 1.0)
        return CostCurve.line(*self._cost.fit())


class Controller:
    """γ of one session over time: `choose`, and now and then a look at whether guessing pays again."""

    def __init__(self, gamma_max: int, estimator: Estimator, fixed: int | None, fixed_patience_us: int | None) -> None:
        self._gamma_max = gamma_max
        self._fixed = fixed
        self._fixed_patience_us = fixed_patience_us
        self._plain_steps = 0
        self._pause = PROBE_AFTER
        self._probing = 0
        self.estimator = estimator
        self.gamma = 0
        self.patience_ms = 0.0

    @property
    def wants_drafter(self) -> bool:
        return (self._gamma_max if self._fixed is None else self._fixed) > 0

    def judged(self, verdict: Verdict) -> None:
        self.estimator.judged(verdict, asked=self.gamma, waited=self.patience_ms > 0)
        if self._probing and verdict.accepted:
            self._probing += PROBE_STEPS  # promising: look on

    def decide(self, round_trips_ms: float, *, attached: bool) -> Steering | None:
        """What to steer to now, if anything changes."""
        choice = self._next(round_trips_ms) if attached else Choice(0, 0.0, 0.0)
        if self._fixed_patience_us is not None and choice.gamma:
            choice = Choice(choice.gamma, self._fixed_patience_us / 1000, choice.tokens_per_s)
        unchanged = (
            choice.gamma == self.gamma and 0.75 * self.patience_ms <= choice.patience_ms <= 1.25 * self.patience_ms
        )
        if unchanged:
            return None
        self.gamma, self.patience_ms = choice.gamma, choice.patience_ms
        return choice.steering()

    def _next(self, round_trips_ms: float) -> Choice:
        conditions = self.estimator.conditions(round_trips_ms)
        if self._fixed is not None:
            # A fixed γ is meant: wait generously, so that it is what happens.
            patience = max(50.0, 4.0 * patience_for(conditions, self._fixed)) if self._fixed else 0.0
            return Choice(self._fixed, min(patience, MAX_PATIENCE_MS), rate(conditions, self._fixed))
        choice = choose(conditions, self._gamma_max, None if self._probing else self.gamma)
        if choice.gamma:
            self._plain_steps = self._probing = 0
            self._pause = PROBE_AFTER
            return choice
        return self._look(conditions) or choice

    def _look(self, conditions: Conditions) -> Choice | None:
        """While plain wins: now and then take guesses if they come, without waiting for them."""
        # Plain steps that pass before a guess is there: it must reach beyond them.
        late = min(MAX_GAMMA, math.ceil(conditions.link_ms / max(conditions.verify_ms(0), 1e-3)))
        if self._probing:
            self._probing -= 1
            if self._probing == 0:
                self._pause = min(PROBE_AT_MOST, 2 * self._pause)
        else:
            self._plain_steps += 1
            if self._plain_steps % self._pause:
                return None
            self._probing = PROBE_STEPS + late
        gamma = min(PROBE_GAMMA + late, self._gamma_max)
        return Choice(gamma, 0.0, rate(conditions, 0))


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
