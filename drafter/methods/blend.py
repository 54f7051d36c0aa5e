"""Several drafting methods as one, selected per session and request by measured accuracy and speed.

Members without a model always propose, since that costs next to nothing. Then
the expected tokens per second decide: use the proposal, let a model draft, or
use the proposal and let a model continue it. Under rejection and block
verification the decision depends on the past alone and precedes all sampling,
and every sampled token is used.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from drafter.accuracy import AccuracyTracker, Rate, Record, token_positions
from drafter.interface import Drafter, DraftRequest, DraftResult
from drafter.proposal import Proposal, Proposer
from drafter.proposal_branch import ProposalBranch
from drafter.round_estimate import RoundEstimate, full_acceptance_probability
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import HiddenStates
from outrider.protocol.vocabulary import Vocabulary

_MAX_PENDING_POSITIONS = 4096  # hidden states kept for a member that does not draft
_HIT_RATE_PRIOR = 0.8  # of a model: optimistic, so that it is tried
_SMOOTHING = 0.2
_NO_PROPOSAL = Proposal(DraftResult(done=True), 0.0)


class _DraftSource(enum.Enum):
    """Origin of the guesses for one request."""

    PROPOSAL = enum.auto()
    PROPOSAL_THEN_MODEL = enum.auto()  # the proposal now, a model after it with the next request
    MODEL = enum.auto()


@dataclass(frozen=True, slots=True)
class _DraftPlan:
    request: DraftRequest
    proposer: str
    proposal: Proposal
    models: tuple[str, ...]  # best first
    source: _DraftSource = _DraftSource.PROPOSAL

    @property
    def model(self) -> str:
        return self.models[0] if self.models else ""

    def branch(self) -> ProposalBranch:
        return ProposalBranch(self.request, self.proposal.result.tokens if self.request.branches > 1 else ())


class _PendingHiddenStates:
    """Hidden states that a member has not received yet; beyond the limit the oldest are dropped."""

    def __init__(self) -> None:
        self._parts: deque[HiddenStates] = deque()
        self._positions = 0

    def add(self, parts: Sequence[HiddenStates]) -> None:
        for part in parts:
            self._parts.append(part)
            self._positions += _num_positions(part)
        while self._positions > _MAX_PENDING_POSITIONS and len(self._parts) > 1:
            self._positions -= _num_positions(self._parts.popleft())

    def take(self) -> tuple[HiddenStates, ...]:
        taken = tuple(self._parts)
        self._parts.clear()
        self._positions = 0
        return taken


class _SessionState:
    """Measurements of one session, and the hidden states for its members."""

    def __init__(self, request: DraftRequest, members: Sequence[str], state_members: Sequence[str], now: float) -> None:
        self.accuracy = AccuracyTracker(request.committed)
        self.records = {name: Record() for name in members}
        self.pending_states = {name: _PendingHiddenStates() for name in state_members}
        self.rest_s: float | None = None  # time between two commits without drafting
        self.draft_s = 0.0  # drafting since the last commit
        self._committed_at = now

    def committed(self, now: float) -> None:
        """Update the time between two commits."""
        rest = max(0.0, now - self._committed_at - self.draft_s)
        self.rest_s = rest if self.rest_s is None else self.rest_s + _SMOOTHING * (rest - self.rest_s)
        self._committed_at, self.draft_s = now, 0.0


class BlendDrafter:
    """Drafter made of at least two members, named by their kinds."""

    def __init__(self, members: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._members = dict(members)
        self._clock = clock
        self._proposers = [name for name, member in members.items() if isinstance(member, Proposer)]
        self._models = [name for name in members if name not in self._proposers]
        self._state_members = [name for name, member in members.items() if member.needs_hidden_states]
        _check_same_target(self._members)
        self.vocabulary: Vocabulary | None = next(
            (member.vocabulary for member in members.values() if member.vocabulary is not None), None
        )
        self._records = {name: Record() for name in members}
        self._seconds = {name: Rate() for name in self._models}  # per level of a draft
        self._rest_s: float | None = None  # latest measurement of any session, for new sessions
        self._sessions: dict[str, _SessionState] = {}

    @property
    def info(self) -> ModelInfo:
        """Return the info of the first member with a vocabulary, with the target that any member is trained for."""
        infos = {name: member.info for name, member in self._members.items()}
        fingerprint = hashlib.sha256("+".join(info.fingerprint for info in infos.values()).encode()).hexdigest()[:32]
        ranked = sorted(infos, key=lambda name: (name in self._proposers, self._members[name].vocabulary is None))
        target_digest = {info.target_digest for info in infos.values()} - {""}
        return replace(
            infos[ranked[0]],
            name="+".join(self._members),
            fingerprint=fingerprint,
            target_digest=next(iter(target_digest), ""),
        )

    @property
    def needs_hidden_states(self) -> bool:
        return bool(self._state_members)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftResult]:
        plans = [self._plan(request) for request in requests]
        drafted = self._run_models(plans)
        return [self._result(plan, drafted.get(plan.request.session)) for plan in plans]

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)
        for member in self._members.values():
            member.forget(session)

    # Selection of the source.

    def _plan(self, request: DraftRequest) -> _DraftPlan:
        session = self._sessions.get(request.session)
        if session is None:
            session = _SessionState(request, list(self._members), self._state_members, self._clock())
            self._sessions[request.session] = session
        if session.accuracy.update(request, (session.records, self._records)):
            session.committed(self._clock())
            self._rest_s = session.rest_s
        for pending in session.pending_states.values():
            pending.add(request.hidden_states)
        proposer, proposal = self._best_proposal(session, request)
        plan = _DraftPlan(request, proposer, proposal, self._rank_models(session, request))
        return replace(plan, source=self._choose_source(session, plan))

    def _best_proposal(self, session: _SessionState, request: DraftRequest) -> tuple[str, Proposal]:
        """Return the best proposer and its chain, with the expected accepted tokens corrected by its record."""
        chain_request = request if request.branches == 1 else _from_committed(request)
        best = ("", _NO_PROPOSAL)
        for name in self._proposers:
            proposal = self._propose(name, chain_request)
            tokens = proposal.result.tokens
            session.accuracy.record_chain(name, chain_request, tokens, proposal.expected)
            expected = session.records[name].expected_accepted(proposal.expected, self._records[name])
            if tokens and expected > best[1].expected:
                best = name, Proposal(proposal.result, min(expected, float(len(tokens))))
            elif not best[0] and not proposal.result.done:
                best = "", Proposal(proposal.result, 0.0)  # its indexing is not complete: it must be called again
        return best

    def _propose(self, name: str, request: DraftRequest) -> Proposal:
        member = self._members[name]
        if isinstance(member, Proposer):
            return member.propose(request)
        result = member.draft([request])[0]
        return Proposal(result, float(len(result.tokens)))

    def _choose_source(self, session: _SessionState, plan: _DraftPlan) -> _DraftSource:
        request, model, proposal = plan.request, plan.model, plan.proposal
        tokens = len(proposal.result.tokens)
        if not model or not tokens:
            return _DraftSource.MODEL if model else _DraftSource.PROPOSAL
        estimate = self._estimate(session, request, model)
        levels = request.max_new_tokens
        model_speed = estimate.tokens_per_s(estimate.with_model(levels), levels)
        if request.branches > 1 and estimate.depth:
            # The open tree already has levels, and the proposal is another branch of it: continue, or stop here.
            stop_speed = estimate.tokens_per_s(max(estimate.open_accepted, proposal.expected), 0)
            return _DraftSource.MODEL if model_speed > stop_speed else _DraftSource.PROPOSAL
        left = max(0, levels - tokens)
        continued = full_acceptance_probability(proposal.expected, tokens) * estimate.chain(left)
        mixed_speed = estimate.tokens_per_s(estimate.with_proposal(proposal.expected + continued), left)
        speeds = {
            _DraftSource.PROPOSAL: estimate.tokens_per_s(estimate.with_proposal(proposal.expected), 0),
            _DraftSource.PROPOSAL_THEN_MODEL: mixed_speed if left else 0.0,
            _DraftSource.MODEL: model_speed,
        }
        return max(speeds, key=lambda source: speeds[source])

    def _rank_models(self, session: _SessionState, request: DraftRequest) -> tuple[str, ...]:
        def speed(name: str) -> float:
            estimate = self._estimate(session, request, name)
            return estimate.tokens_per_s(estimate.with_model(request.max_new_tokens), request.max_new_tokens)

        return tuple(sorted(self._models, key=speed, reverse=True))

    def _estimate(self, session: _SessionState, request: DraftRequest, model: str) -> RoundEstimate:
        seconds, depth = self._seconds[model], len(request.tokens) - request.committed
        level_s = seconds.total / seconds.weight if seconds.weight else 0.0
        rest_s = self._rest_s if session.rest_s is None else session.rest_s
        return RoundEstimate(
            hit_rate=session.records[model].hit_rate(self._records[model], _HIT_RATE_PRIOR),
            depth=depth,
            level_s=level_s,
            # Before the first measurement, the rest of a round counts as much as the model's draft.
            rest_s=(depth + request.max_new_tokens) * level_s if rest_s is None else rest_s,
        )

    # Drafting.

    def _run_models(self, plans: Sequence[_DraftPlan]) -> dict[str, DraftResult]:
        """Return the models' results by session; a model without a result gives way to the next best."""
        results: dict[str, DraftResult] = {}
        started = self._clock()
        open_plans = [plan for plan in plans if plan.source is _DraftSource.MODEL]
        for rank in range(len(self._models)):
            for model in self._models:
                requests = [self._model_request(plan, model) for plan in open_plans if plan.models[rank] == model]
                if requests:
                    results |= self._run_model(model, requests)
            open_plans = [plan for plan in open_plans if not _usable(results[plan.request.session])]
        spent = self._clock() - started
        for plan in plans:
            self._sessions[plan.request.session].draft_s += spent
        return results

    def _run_model(self, model: str, requests: Sequence[DraftRequest]) -> dict[str, DraftResult]:
        started = self._clock()
        results = self._members[model].draft(requests)
        spent = self._clock() - started
        levels = 0
        for request, result in zip(requests, results, strict=True):
            self._sessions[request.session].accuracy.record_tokens(model, request, result)
            levels = max(levels, len({position for position, _, _ in token_positions(request, result)}))
        if levels:
            self._seconds[model].add(spent, levels)
        return {request.session: result for request, result in zip(requests, results, strict=True)}

    def _model_request(self, plan: _DraftPlan, model: str) -> DraftRequest:
        request = plan.request
        pending = self._sessions[request.session].pending_states.get(model)
        request = replace(request, hidden_states=pending.take() if pending is not None else ())
        missing = plan.branch().missing
        if not missing:
            return request
        # Keep budget and a branch for the proposal, which joins the finished tree.
        budget = request.budget - missing
        levels = min(request.max_new_tokens, budget)
        return replace(request, budget=budget, branches=request.branches - 1, max_new_tokens=levels)

    def _result(self, plan: _DraftPlan, drafted: DraftResult | None) -> DraftResult:
        if drafted is not None and _usable(drafted):
            branch = plan.branch()
            return branch.join(drafted) if branch.missing else drafted
        if plan.request.branches > 1 and plan.proposer:
            # A proposal is a chain; the proposer may draft a tree, or a chain after the longest open one.
            result = self._members[plan.proposer].draft([plan.request])[0]
        else:
            result = plan.proposal.result
        if not result.tokens and not result.done:
            return result
        return replace(result, done=plan.source is not _DraftSource.PROPOSAL_THEN_MODEL or not result.tokens)


def _check_same_target(members: Mapping[str, Drafter]) -> None:
    vocabularies = {name: member.vocabulary for name, member in members.items() if member.vocabulary is not None}
    targets = {name: member.info.target_digest for name, member in members.items() if member.info.target_digest}
    for problem, values in (("have different vocabularies", vocabularies), ("have different targets", targets)):
        first = next(iter(values), "")
        other = next((name for name in values if values[name] != values[first]), None)
        if other is not None:
            raise StartupError(
                f"{first} and {other} {problem}",
                field="kind",
                value="+".join(members),
                limit="members for one target",
            )


def _usable(result: DraftResult) -> bool:
    """Return whether a result has tokens or asks for another call."""
    return bool(result.tokens) or not result.done


def _num_positions(hidden_states: HiddenStates) -> int:
    return len(hidden_states.rows) // (2 * hidden_states.width)


def _from_committed(request: DraftRequest) -> DraftRequest:
    """Return the request without its open guesses, for a chain that may become a branch."""
    return replace(
        request,
        tokens=request.tokens[: request.committed],
        max_new_tokens=request.depth,
        open_tokens=(),
        open_parents=(),
        branches=1,
    )
