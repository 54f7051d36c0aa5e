"""Estimator: measurements that verdicts and guesses give about a session. Pure: no clocks, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.control.throughput_model import Conditions, Mode, SpeculationPlan, expected_tokens
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.speculation import TokenKind, Verdict

PRIOR_ACCEPTANCE = 0.6
PRIOR_TRIALS = 4.0
PRIOR_GAIN = 0.4  # share of failed guesses whose right token is on another of three branches
PRIOR_GAIN_TRIALS = 10.0
PRIOR_TREE_ROWS = 2.0
DECAY = 0.98  # of a trial's weight, per step with guesses
SMOOTHING = 0.15
WAIT_SMOOTHING = 0.4  # of waits: a drafter that stalls costs whole timeouts, so it counts sooner
TIMED_OUT = 0.9  # share of the draft wait timeout from which on a wait counts as timed out
MAX_FITTED_TOKENS = 256  # larger steps contain prompts, whose cost follows another line
PRIOR_TOKEN_SHARE = 0.04  # of a step's cost for each further token, until more is measured


@dataclass(slots=True)
class CostLine:
    """Linear fit of step time by number of tokens, with exponential forgetting and a bounded slope.

    It serves verifiers that publish no cost curve.
    """

    weight: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    tokens_squared: float = 0.0
    tokens_ms: float = 0.0

    def add(self, tokens: float, ms: float) -> None:
        keep = 1 - SMOOTHING / 2
        self.weight = self.weight * keep + 1.0
        self.tokens = self.tokens * keep + tokens
        self.ms = self.ms * keep + ms
        self.tokens_squared = self.tokens_squared * keep + tokens**2
        self.tokens_ms = self.tokens_ms * keep + tokens * ms

    def fit(self) -> tuple[float, float]:
        """Return the milliseconds for one token and for each further one."""
        if self.weight == 0.0:
            return 0.0, 0.0
        mean_tokens, mean_ms = self.tokens / self.weight, self.ms / self.weight
        prior = mean_ms * PRIOR_TOKEN_SHARE
        variance = self.tokens_squared / self.weight - mean_tokens**2
        covariance = self.tokens_ms / self.weight - mean_tokens * mean_ms
        slope = (covariance + prior) / (variance + 1.0)
        slope = min(max(slope, 0.0), mean_ms / max(mean_tokens, 1.0))
        return mean_ms - slope * (mean_tokens - 1.0), slope


@dataclass(slots=True)
class PairHistory:
    """Measurements of a target and a drafter that a new session starts from. The field names are stored in Redis."""

    acceptance: list[float] = field(default_factory=list)
    offer_rate: float = 1.0
    draft_ms: float = 0.0
    tree_gain: float = PRIOR_GAIN
    ahead_gain: float = PRIOR_GAIN
    tree_rows: float = PRIOR_TREE_ROWS
    level_ms: float = 0.0
    paces: dict[str, float] = field(default_factory=dict)  # measured over expected throughput, by mode


@dataclass(slots=True)
class HitRate:
    """Decayed mean of hits and misses, begun from a prior `hits` between 0 and 1."""

    hits: float
    trials: float = PRIOR_GAIN_TRIALS

    def __post_init__(self) -> None:
        self.hits *= self.trials

    def add(self, *, hit: bool) -> None:
        self.trials = self.trials * DECAY + 1.0
        self.hits = self.hits * DECAY + hit

    @property
    def mean(self) -> float:
        return self.hits / self.trials


class PairEstimate:
    """Estimates of a target and its drafters in this session, begun from their pair history."""

    def __init__(self, positions: int) -> None:
        self._positions = max(1, positions)
        self.start_from(PairHistory())

    def start_from(self, history: PairHistory) -> None:
        self._history = history
        self._hits = [0.0] * self._positions
        self._trials = [0.0] * self._positions
        self._prior_weight = [PRIOR_TRIALS] * self._positions
        self._tree_hits = HitRate(history.tree_gain)
        self._ahead_hits = HitRate(history.ahead_gain)
        self.checked_steps = 0
        self.proposal_rate = history.offer_rate
        self.draft_ms = history.draft_ms
        self.level_ms = history.level_ms
        self.nodes_per_level = history.tree_rows
        self.throughput_ratios = {Mode(mode): ratio for mode, ratio in history.paces.items()}

    def observe_draft(self, depth: int, draft_us: int, *, tree: bool = False) -> None:
        """Record the drafting time of a guess of this depth."""
        if not depth or not draft_us:
            return  # a guess that is split over messages reports its time with the first
        taken = draft_us / 1000 / depth
        if tree:
            self.level_ms = _smooth(self.level_ms, taken) if self.level_ms else taken
        else:
            self.draft_ms = _smooth(self.draft_ms, taken)

    def observe_verdict(self, proposed: int, accepted: int, *, due: bool, from_branches: int = 0) -> None:
        """Record a verdict.

        `due`: guesses were expected. `from_branches`: number of tokens accepted from a branch.
        """
        if due:
            self.proposal_rate = _smooth(self.proposal_rate, 1.0 if proposed else 0.0)
        self.checked_steps += proposed > 0
        for i in range(min(accepted + 1, proposed, len(self._trials))):
            # The verdict does not report which tokens came from a branch. The last ones are the likeliest:
            # what follows a branch is drafted last.
            self._add_trial(i, hit=i < accepted - from_branches)

    def observe_late_guess(self, *, hit: bool) -> None:
        """Record a guess for a token that was committed before it arrived.

        No verdict reports late guesses that failed. Without them, only hits
        would be counted where the verifier does not wait.
        """
        self._add_trial(0, hit=hit)

    def _add_trial(self, position: int, *, hit: bool) -> None:
        self._prior_weight[position] *= DECAY
        self._trials[position] = self._trials[position] * DECAY + 1.0
        self._hits[position] = self._hits[position] * DECAY + hit

    def observe_tree(self, verdict: Verdict, *, ahead: bool) -> None:
        """Record what the branches of a checked tree contributed."""
        missed = verdict.last is TokenKind.RECOVERED
        hit_rate = self._ahead_hits if ahead else self._tree_hits
        for _ in range(verdict.accepted_from_branch):
            hit_rate.add(hit=True)
        if missed:
            hit_rate.add(hit=ahead and verdict.remaining_depth > 0)
        if verdict.proposed:
            self.nodes_per_level = _smooth(self.nodes_per_level, max(1.0, verdict.nodes / verdict.proposed))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return the acceptance per position, shrunk towards the pair history.

        A position without history is shrunk towards the position before it.
        """
        known = self._history.acceptance
        result: list[float] = []
        for i, (hits, trials, weight) in enumerate(zip(self._hits, self._trials, self._prior_weight, strict=True)):
            before = result[-1] if result else PRIOR_ACCEPTANCE
            prior = known[i] if i < len(known) else before
            result.append((hits + weight * prior) / (trials + weight))
        return tuple(result)

    @property
    def tree_gain(self) -> float:
        return self._tree_hits.mean

    @property
    def ahead_gain(self) -> float:
        return self._ahead_hits.mean

    @property
    def accepted_tokens(self) -> float:
        """Return the mean number of tokens that are accepted of a guess of the greatest length."""
        return expected_tokens(self.acceptance, self._positions) - 1.0

    def history(self) -> PairHistory:
        return PairHistory(
            acceptance=list(self.acceptance),
            offer_rate=self.proposal_rate,
            draft_ms=self.draft_ms,
            tree_gain=self.tree_gain,
            ahead_gain=self.ahead_gain,
            tree_rows=self.nodes_per_level,
            level_ms=self.level_ms,
            paces={mode.value: ratio for mode, ratio in self.throughput_ratios.items()},
        )


class Estimator:
    """Estimates of one session's conditions. `pair` covers all its drafters together."""

    def __init__(self, positions: int) -> None:
        self.pair = PairEstimate(positions)
        self._network_ms: float | None = None
        self._timeout_rate = 0.0
        self.shortfall_rate = 0.0  # share of the waits that timed out with fewer guesses than γ
        self._cost = CostLine()
        self._published = UNKNOWN_COST
        self._slowdown: float | None = None  # measured step time over the published one
        self._other_tokens = 0.0
        self._other_sessions = 0.0
        self._other_tokens_per_ms = 0.0
        self._steps = 0  # on this verifier

    def attach_verifier(self, published: CostCurve, sessions: int = 0) -> None:
        """Start from the cost curve and the number of sessions that a verifier reports."""
        self._published = published
        self._slowdown = None
        self._steps = 0
        self._other_sessions = self._other_tokens = float(sessions)
        self._other_tokens_per_ms = sessions / max(1e-6, published.at(sessions + 1)) if published.rows else 0.0

    def observe(self, verdict: Verdict, *, plan: SpeculationPlan, wait_timeout_ms: float) -> bool:
        """Record a verdict under this plan; return whether its wait timed out without a guess."""
        self._observe_step(verdict)
        tree, asked, waited = plan.branches > 1, plan.gamma > 0, wait_timeout_ms > 0
        due = asked and (waited or verdict.proposed > 0)
        self.pair.observe_verdict(
            verdict.proposed, verdict.accepted, due=due, from_branches=verdict.accepted_from_branch
        )
        if tree:
            self.pair.observe_tree(verdict, ahead=plan.ahead)
        wait_ms = verdict.timings.wait_us / 1000
        if asked and waited and not plan.ahead:
            drafting = verdict.proposed * (self.pair.level_ms if tree else self.pair.draft_ms)
            network_ms = max(0.0, wait_ms - drafting)
            self._network_ms = network_ms if self._network_ms is None else _smooth(self._network_ms, network_ms)
        timed_out = waited and wait_ms >= TIMED_OUT * wait_timeout_ms
        in_vain = timed_out and not verdict.proposed
        if in_vain or verdict.proposed:
            self._timeout_rate = _smooth(self._timeout_rate, in_vain, WAIT_SMOOTHING)
        if waited:  # a conforming drafter with fewer guesses reports that, which ends the wait before its timeout
            short = timed_out and verdict.proposed < plan.gamma
            self.shortfall_rate = _smooth(self.shortfall_rate, short, WAIT_SMOOTHING)
        return in_vain

    def _observe_step(self, verdict: Verdict) -> None:
        timings = verdict.timings
        if timings.batch_tokens > MAX_FITTED_TOKENS:
            return
        step_ms = timings.step_us / 1000
        self._cost.add(timings.batch_tokens, step_ms)
        if self._published.rows:
            slowdown = step_ms / self._published.at(timings.batch_tokens)
            self._slowdown = slowdown if self._slowdown is None else _smooth(self._slowdown, slowdown)
        self._observe_others(verdict, step_ms)

    def _observe_others(self, verdict: Verdict, step_ms: float) -> None:
        """Record the other sessions of a step. The first steps weigh more: other sessions may have begun with ours."""
        self._steps += 1
        weight = max(SMOOTHING, 1.0 / (1 + self._steps))
        timings = verdict.timings
        committed = max(0, timings.step_tokens - len(verdict.tokens))
        self._other_tokens = _smooth(self._other_tokens, timings.batch_tokens - timings.session_tokens, weight)
        self._other_sessions = _smooth(self._other_sessions, timings.sessions - 1, weight)
        per_ms = committed / step_ms if step_ms else 0.0
        self._other_tokens_per_ms = _smooth(self._other_tokens_per_ms, per_ms, weight)

    def conditions(self, round_trips_ms: float) -> Conditions:
        """Return the present conditions; the round trips to drafter and verifier count until waits were measured."""
        return Conditions(
            acceptance=self.pair.acceptance,
            proposal_rate=self.pair.proposal_rate,
            draft_ms=self.pair.draft_ms,
            network_ms=self._network_ms if self._network_ms is not None else round_trips_ms,
            cost=self._cost_curve(),
            other_tokens=self._other_tokens,
            other_sessions=self._other_sessions,
            other_tokens_per_ms=self._other_tokens_per_ms,
            tree_gain=self.pair.tree_gain,
            ahead_gain=self.pair.ahead_gain,
            nodes_per_level=self.pair.nodes_per_level,
            level_ms=self.pair.level_ms or None,
            timeout_rate=self._timeout_rate,
            throughput_ratios=self.pair.throughput_ratios,
        )

    def _cost_curve(self) -> CostCurve:
        """Return the published cost curve scaled to the measured steps, or a linear fit of these steps."""
        if self._published.rows:
            return self._published.scaled(self._slowdown or 1.0)
        return CostCurve.line(*self._cost.fit())


def _smooth(old: float, new: float, weight: float = SMOOTHING) -> float:
    return old + weight * (new - old)
