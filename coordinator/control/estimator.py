"""Estimator: measurements that verdicts and guesses give about a session. Pure: no clocks, no I/O."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from coordinator.control.throughput_model import Conditions, Mode, SpeculationPlan, expected_tokens
from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.speculation import TokenKind, Verdict

PRIOR_ACCEPTANCE = 0.6
PRIOR_TRIALS, DIRECT_TRIALS = 4.0, 24.0  # the latter for what was remembered, without a network
MIN_KNOWN = 0.05  # acceptance in the pair history with which a position is compared
PRIOR_GAIN = 0.4  # share of failed guesses whose right token is on another of three branches
PRIOR_GAIN_TRIALS = 10.0
PRIOR_TREE_ROWS = 2.0
FORGETTING = 0.02  # of earlier trials, per trial
SMOOTHING = 0.15
WAIT_SMOOTHING = 0.4  # of waits: a drafter that stalls costs whole timeouts, so it counts sooner
LATE_FACTOR = 1.5  # of the known time of a guess, which one that came too late took at least
TIMED_OUT = 0.9  # share of the draft wait timeout from which on a wait counts as timed out
MAX_FITTED_TOKENS = 256  # larger steps contain prompts, whose cost follows another line
PRIOR_TOKEN_SHARE = 0.04  # of a step's cost for each further token, until more is measured
RATIO_SMOOTHING = 0.2  # at least; the first comparisons weigh more
KNOWN_COMPARISONS = 3  # comparisons that a ratio of the pair history counts for
RECOVERY = 0.02  # per choice, of what the present plan does not measure
RATIO_BOUNDS = (0.3, 1.5)
# The credit of speculation on shared cores, in plain steps:
CREDIT = 0.6  # at the beginning, at most; with less, no probe begins, nor speculation that was suspended
REFILL = 0.012  # per plain step, up to CREDIT
DIRECT_CREDIT, DIRECT_REFILL, DIRECT_DEBT = 1.5, 0.015, 0.9  # of drafters without a network, whose guesses mostly gain
READING = 2.0  # that an attached drafter costs, as it reads the prompt
MAX_CREDIT = 6.0  # after gains: what may be lost before a change of the text ends speculation
MAX_GAINED = 30.0  # by a kind of text, or lost: what many answers may lose before its drafters wait, or refill
WINDOW = 9  # plain steps on shared cores that tell what one takes
JOINED, LEFT = 0.8, 0.3  # other sessions of a step, from which on the verifier is shared, and no longer is
KNOWN_STEPS = 3  # for their median to count
BEGINNING = 4  # steps of a session that opening it has slowed down, and guesses without a network


class CostLine:
    """Linear fit of step time by tokens, for verifiers without a cost curve: it forgets, and its slope is bounded."""

    def __init__(self) -> None:
        self._means = [DecayedMean(SMOOTHING / 2, 0.0, trials=0.0) for _ in range(4)]

    def add(self, tokens: float, ms: float) -> None:
        for mean, value in zip(self._means, (tokens, ms, tokens**2, tokens * ms), strict=True):
            mean.add(value)

    def fit(self) -> tuple[float, float]:
        """Return the milliseconds for one token and for each further one."""
        tokens, ms, tokens_squared, tokens_ms = (mean.value for mean in self._means)
        variance, covariance = tokens_squared - tokens**2, tokens_ms - tokens * ms
        slope = (covariance + ms * PRIOR_TOKEN_SHARE) / (variance + 1.0)
        slope = min(max(slope, 0.0), ms / max(tokens, 1.0))
        return ms - slope * (tokens - 1.0), slope


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
    gained: float = 0.0  # by all sessions, on shared cores, in plain steps


class ThroughputRatios:
    """Measured over expected throughput by mode: a correction for what the model omits."""

    def __init__(self, known: Mapping[str, float]) -> None:
        self._means = {Mode(mode): DecayedMean(RATIO_SMOOTHING, ratio) for mode, ratio in known.items()}
        self._comparisons = Counter(dict.fromkeys(self._means, KNOWN_COMPARISONS))
        self.measured = {Mode(mode): ratio for mode, ratio in known.items()}  # at the last comparison

    def add(self, mode: Mode, ratio: float) -> None:
        """Record a comparison. The first ones weigh more."""
        low, high = RATIO_BOUNDS
        weight = max(RATIO_SMOOTHING, 1.0 / (2 + self._comparisons[mode]))
        self._means.setdefault(mode, DecayedMean(RATIO_SMOOTHING, 1.0)).add(min(high, max(low, ratio)), weight)
        self._comparisons[mode] += 1
        self.measured[mode] = self._means[mode].value

    def recover(self, used: Mode) -> None:
        """Move the modes that are not in use towards 1, so that they are tried again after a bad phase."""
        for mode, mean in self._means.items():
            if mode is not used:
                mean.add(1.0, RECOVERY)

    def by_mode(self) -> dict[Mode, float]:
        return {mode: mean.value for mode, mean in self._means.items()}


@dataclass(frozen=True, slots=True)
class BestDrafter:
    """The figures of a session's best drafter, on which a choice of plan depends. Times are in milliseconds."""

    round_trips_ms: float  # to the drafter and to the verifier, together
    draft_ms: float  # per token of a chain
    level_ms: float | None = None  # per level of a tree; None: as for a chain
    shares_cores: bool = False  # with the verifier, which drafting ahead slows down


class PairEstimate:
    """Estimates of a target and its drafters in this session, begun from their pair history."""

    def __init__(self, positions: int) -> None:
        self._positions = max(1, positions)
        self.link(direct=False, trust=False)
        self.start_from(PairHistory())

    def link(self, *, trust: bool, direct: bool = True) -> None:
        """Expect a drafter, `direct`: without a network; `trust` lets such a one lose more before it is suspended."""
        self.direct = direct
        self.least_credit, self.refill, self._most_owed = CREDIT, REFILL, math.inf
        if direct and trust:
            self.least_credit, self.refill, self._most_owed = DIRECT_CREDIT, DIRECT_REFILL, DIRECT_DEBT

    def expect(self, acceptance: list[float]) -> None:
        """Expect this acceptance by position, whatever was seen before."""
        self._known_acceptance, self.renewed = acceptance, True  # until the next choice of a plan
        self._accepted = [DecayedMean(FORGETTING, 0.0, trials=0.0) for _ in range(self._positions)]

    def start_from(self, history: PairHistory) -> None:
        self.expect(history.acceptance)
        self.tree_gain = DecayedMean(FORGETTING, history.tree_gain, PRIOR_GAIN_TRIALS)
        self.ahead_gain = DecayedMean(FORGETTING, history.ahead_gain, PRIOR_GAIN_TRIALS)
        self.proposal_rate = DecayedMean(SMOOTHING, history.offer_rate)
        self.draft_ms = DecayedMean(SMOOTHING, history.draft_ms or None)
        self.level_ms = DecayedMean(SMOOTHING, history.level_ms or None)
        self.nodes_per_level = DecayedMean(SMOOTHING, history.tree_rows)
        self.ratios = ThroughputRatios(history.paces)
        self.lend(history.gained)
        self.checked = 0  # verdicts with guesses
        self.late = 0  # waits in a row that ended before a guess came

    def lend(self, gained: float, own: float = 0.0) -> None:
        """Begin with a credit, less the debt that earlier sessions have left. No session may lose all they gained."""
        self.credit = self.lent = min(max(own, self.least_credit), MAX_CREDIT) + min(0.0, max(gained, -self._most_owed))

    @property
    def reads(self) -> bool:
        """Return whether the time of the next guess says little of later ones: the first ones take longer."""
        return self.direct and self.checked < BEGINNING

    def gain(self, steps: float) -> None:
        """Count what a step gained. The kind of text has gained it even where the credit is at its bound."""
        unbounded = self.credit + steps
        self.credit = max(-MAX_CREDIT, min(MAX_CREDIT, unbounded))
        self.lent += self.credit - unbounded

    def observe_draft(self, depth: int, draft_us: int, *, tree: bool = False) -> None:
        """Record the drafting time of a guess of this depth."""
        if depth and draft_us and not self.reads:  # a guess that is split over messages reports its time with the first
            self.add(self.level_ms if tree else self.draft_ms, draft_us / 1000 / depth)

    def observe_late_draft(self, depth: int, waited_us: int, *, tree: bool) -> None:
        """Record that a guess without a network took longer than this: its own time comes with a guess in time."""
        mean = self.level_ms if tree else self.draft_ms
        mean.add(max(waited_us / 1000 / depth, LATE_FACTOR * mean.value))

    def add(self, mean: DecayedMean, ms: float) -> None:
        """Add a time. Without a network, what takes much longer than usual was delayed by other load."""
        mean.add(min(ms, 2.0 * mean.value) if self.direct and mean.known else ms)

    def observe_verdict(self, proposed: int, accepted: int, *, due: bool, from_branches: int = 0) -> None:
        """Record a verdict; `due`: guesses were expected; `from_branches`: tokens accepted from a branch."""
        if due:
            self.proposal_rate.add(proposed > 0)
        self.checked += proposed > 0
        for i in range(min(accepted + 1, proposed, len(self._accepted))):
            # The verdict does not report which tokens came from a branch. The last ones are the likeliest:
            # what follows a branch is drafted last.
            self._accepted[i].add(i < accepted - from_branches)

    def observe_late_guess(self, *, hit: bool) -> None:
        """Record a guess for a token that was committed before it arrived: no verdict reports those that failed."""
        self._accepted[0].add(hit)

    def observe_tree(self, verdict: Verdict, *, ahead: bool) -> None:
        """Record what the branches of a checked tree contributed."""
        gain = self.ahead_gain if ahead else self.tree_gain
        for _ in range(verdict.accepted_from_branch):
            gain.add(True)
        if verdict.last is TokenKind.RECOVERED:
            gain.add(ahead and verdict.remaining_depth > 0)
        if verdict.proposed:
            self.nodes_per_level.add(max(1.0, verdict.nodes / verdict.proposed))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return the acceptance per position, shrunk towards the pair history as far as the one before has followed it.

        A position without history is shrunk towards the position before it.
        """
        result: list[float] = []
        prior, shift = PRIOR_ACCEPTANCE, 1.0
        for i, accepted in enumerate(self._accepted):
            remembered = i < len(self._known_acceptance)
            known, shift = (self._known_acceptance[i], shift) if remembered else (prior, 1.0)
            prior_trials = DIRECT_TRIALS if remembered and self.direct else PRIOR_TRIALS
            prior_trials *= 1.0 - FORGETTING * accepted.trials  # forgotten as earlier trials are
            trials = accepted.trials + prior_trials
            prior = (accepted.value * accepted.trials + min(1.0, known * shift) * prior_trials) / trials
            shift = prior / max(known, MIN_KNOWN)
            result.append(prior)
        return tuple(result)

    @property
    def accepted_tokens(self) -> float:
        """Return the mean number of tokens that are accepted of a guess of the greatest length."""
        return expected_tokens(self.acceptance, self._positions) - 1.0

    def history(self) -> PairHistory:
        return PairHistory(
            acceptance=list(self.acceptance),
            offer_rate=self.proposal_rate.value,
            draft_ms=self.draft_ms.value,
            tree_gain=self.tree_gain.value,
            ahead_gain=self.ahead_gain.value,
            tree_rows=self.nodes_per_level.value,
            level_ms=self.level_ms.value,
            paces={mode.value: ratio for mode, ratio in self.ratios.measured.items()},
        )


def pair_shown(own: PairEstimate, session: PairEstimate, *, alone: bool) -> PairHistory:
    """Return what a drafter and its session have shown; `alone`: no other drafter was in the session."""
    its, shown = own.history(), session.history()
    held = shown.acceptance if alone else its.acceptance  # the session's is without tokens from branches
    return replace(shown, acceptance=held, offer_rate=its.offer_rate, draft_ms=its.draft_ms, level_ms=its.level_ms)


def _mean(measured: Iterable[float]) -> float:
    """Return the mean, of which no value counts for more than twice the median."""
    values = list(measured)
    most = 2.0 * statistics.median(values)
    return statistics.fmean(min(value, most) for value in values)


class Estimator:
    """Estimates of one session's conditions. `pair` covers all its drafters together."""

    def __init__(self, positions: int) -> None:
        self.pair = PairEstimate(positions)
        self._network_ms = DecayedMean(SMOOTHING)
        self._timeout_rate = DecayedMean(WAIT_SMOOTHING, 0.0)
        self.shortfall_rate = DecayedMean(WAIT_SMOOTHING, 0.0)  # waits that timed out with fewer guesses than γ
        self._cost = CostLine()
        self.attach_verifier(UNKNOWN_COST)

    def attach_verifier(
        self, published: CostCurve, sessions: int = 0, plain: deque[tuple[float, float]] | None = None
    ) -> None:
        """Start from the cost curve and the number of sessions that a verifier reports.

        `plain`: its newest plain steps, of all sessions: the time with a single token, and the wait before, ms.
        """
        self._published, self.pair.renewed = published, True
        self._slowdown = DecayedMean(SMOOTHING)  # measured step time over the published one
        self._plain = deque(maxlen=WINDOW) if plain is None else plain
        self._ignored = BEGINNING if self.plain_known else 0
        self._steps = 0  # on this verifier
        tokens_per_ms = sessions / max(1e-6, published.at(sessions + 1)) if published.rows else 0.0
        self._other_tokens = DecayedMean(SMOOTHING, float(sessions))
        self.other_sessions = DecayedMean(SMOOTHING, float(sessions))
        self.shared = sessions > 0 and bool(published.rows)  # with other sessions, whose guesses it compares
        self._other_tokens_per_ms = DecayedMean(SMOOTHING, tokens_per_ms)

    def attach_drafter(self, waits: DecayedMean | None, *, trust: bool) -> None:
        """Start with a session's only drafter; `waits`: of all its sessions, without a network; None: it has one."""
        self.pair.link(direct=waits is not None, trust=trust)
        self._network_ms = waits or DecayedMean(SMOOTHING)

    def observe(self, verdict: Verdict, plan: SpeculationPlan, timeout_ms: float, drafter: BestDrafter | None) -> bool:
        """Record a verdict under this plan; return whether its wait timed out without a guess."""
        self._observe_step(verdict, plan)
        tree, asked, waited, reads = plan.branches > 1, plan.gamma > 0, timeout_ms > 0, self.pair.reads
        due, beside = asked and (waited or verdict.proposed > 0), verdict.accepted_from_branch
        self.pair.observe_verdict(verdict.proposed, verdict.accepted, due=due, from_branches=beside)
        if tree:
            self.pair.observe_tree(verdict, ahead=plan.ahead)
        wait_ms = verdict.timings.wait_us / 1000
        if asked and waited and not plan.ahead and not reads:
            step_ms = 0.0
            if drafter is not None:
                step_ms = drafter.level_ms or 0.0 if tree else drafter.draft_ms
            link_ms = wait_ms - verdict.proposed * step_ms
            if link_ms > 0.0 or self._network_ms.known:  # else guesses of a plan ahead, before this one, were at hand
                self.pair.add(self._network_ms, max(0.0, link_ms))
        timed_out = waited and wait_ms >= TIMED_OUT * timeout_ms
        in_vain = timed_out and not verdict.proposed
        if in_vain or verdict.proposed:
            self._timeout_rate.add(in_vain)
        if waited:  # a conforming drafter with fewer guesses reports that, which ends the wait before its timeout
            self.shortfall_rate.add(timed_out and verdict.proposed < plan.gamma)
        return in_vain

    def recover(self, plan: SpeculationPlan, drafter: BestDrafter) -> None:
        """Expect better of what this plan does not measure, so that it is tried again after a bad phase."""
        self.pair.ratios.recover(plan.mode)
        if self.pair.direct and not plan.gamma and self._network_ms.value > drafter.round_trips_ms:
            self._network_ms.add(drafter.round_trips_ms, RECOVERY)  # later sessions would start from it too

    def on_shared_cores(self, drafter: BestDrafter | None) -> bool:
        """Return whether verifier and drafter share cores, and the cost of plain steps can be told from others."""
        return drafter is not None and drafter.shares_cores and bool(self._published.rows)

    @property
    def plain_known(self) -> bool:
        """Return whether plain steps of this session were measured on shared cores."""
        return not self._published.rows or len(self._plain) >= KNOWN_STEPS

    def _observe_step(self, verdict: Verdict, plan: SpeculationPlan) -> None:
        timings = verdict.timings
        if timings.batch_tokens > MAX_FITTED_TOKENS:
            return
        step_ms = timings.step_us / 1000
        if self._published.rows:
            slowdown = step_ms / self._published.at(timings.batch_tokens)
            self._slowdown.add(slowdown)
            if not plan.gamma and not verdict.proposed and self._steps >= self._ignored:
                self._plain.append((slowdown * self._published.at(1), timings.wait_us / 1000))
        else:
            self._cost.add(timings.batch_tokens, step_ms)
        self._steps += 1
        weight = max(SMOOTHING, 1.0 / (1 + self._steps))  # other sessions may have begun with ours
        committed = max(0.0, timings.step_tokens - len(verdict.tokens) / verdict.steps)
        self._other_tokens.add(timings.batch_tokens - timings.session_tokens, weight)
        self.other_sessions.add(timings.sessions - 1, weight)
        self.shared = self.other_sessions.value > (LEFT if self.shared else JOINED) and bool(self._published.rows)
        self._other_tokens_per_ms.add(committed / step_ms if step_ms else 0.0, weight)

    def conditions(self, drafter: BestDrafter) -> Conditions:
        """Return the present conditions; the round trips to drafter and verifier count until waits were measured."""
        shared = self.on_shared_cores(drafter) and self._plain
        typical = _mean if self.pair.direct else statistics.median  # other load delays single steps
        if self._published.rows:
            plain = typical(each for each, _ in self._plain) / self._published.at(1) if shared else 0.0
            cost = self._published.scaled(plain or self._slowdown.value or 1.0)
        else:
            cost = CostCurve.line(*self._cost.fit())
        pair = self.pair
        return Conditions(
            acceptance=pair.acceptance,
            proposal_rate=pair.proposal_rate.value,
            draft_ms=drafter.draft_ms,
            network_ms=self._network_ms.value if self._network_ms.known else drafter.round_trips_ms,
            cost=cost,
            between_ms=typical(each for _, each in self._plain) if shared else 0.0,
            other_tokens=self._other_tokens.value,
            other_sessions=self.other_sessions.value,
            other_tokens_per_ms=self._other_tokens_per_ms.value,
            tree_gain=pair.tree_gain.value,
            ahead_gain=pair.ahead_gain.value,
            nodes_per_level=pair.nodes_per_level.value,
            level_ms=drafter.level_ms,
            timeout_rate=self._timeout_rate.value,
            shortfall_rate=self.shortfall_rate.value,
            throughput_ratios=pair.ratios.by_mode(),
            shares_cores=self.on_shared_cores(drafter),
            shared=self.shared,
        )
