"""Several drafting methods as one, selected per session and request by measured accuracy and speed.

Members without a model always propose, since that costs next to nothing. Then the expected tokens per second decide:
use the proposal, let a model draft, or use the proposal and let a model continue it. Under rejection and block
verification the decision depends on the past alone and precedes all sampling, and every sampled token is used.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from drafter.blend.accuracy import AccuracyTracker, Rate, Record
from drafter.blend.round_estimate import RoundEstimate, full_acceptance_probability
from drafter.hidden_states.earlier_states import MAX_AWAITING
from drafter.interface import Drafter, DraftRequest, Proposer
from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.checks import MAX_IDS
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.earlier_states import MAX_EARLIER_POSITIONS
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary

_MAX_PENDING_POSITIONS = MAX_EARLIER_POSITIONS + MAX_AWAITING  # kept for a member that does not draft
_HIT_RATE_PRIOR = 0.8  # of a model: optimistic, so that it is tried
_SMOOTHING = 0.2
_OUTLIER = 3.0  # times its usual time: a model that one long draft rules out would not be measured again


class _DraftSource(enum.Enum):
    """Origin of the guesses for one request."""

    PROPOSAL = enum.auto()
    PROPOSAL_THEN_MODEL = enum.auto()  # the proposal now, a model after it with the next request
    MODEL = enum.auto()


class _PendingHiddenStates:
    """Hidden states that a member has not received yet; beyond the limit the oldest are dropped."""

    def __init__(self) -> None:
        self._parts: deque[HiddenStates] = deque()
        self._positions = 0

    def add(self, parts: Sequence[HiddenStates]) -> None:
        for part in parts:
            self._parts.append(part)
            self._positions += part.count
        while self._positions > _MAX_PENDING_POSITIONS and len(self._parts) > 1:
            self._positions -= self._parts.popleft().count

    def take(self) -> tuple[HiddenStates, ...]:
        taken, self._parts, self._positions = tuple(self._parts), deque(), 0
        return taken


class _SessionState:
    """Measurements of one session, the hidden states for its members, and the decision for its present request."""

    def __init__(self, request: DraftRequest, members: Sequence[str], state_members: Sequence[str], now: float) -> None:
        self.request = request
        self.proposer = ""  # of `proposal`
        self.proposal = request.chain(done=True)
        self.models: tuple[str, ...] = ()  # best first
        self.source = _DraftSource.PROPOSAL
        self.accuracy = AccuracyTracker(request.committed)
        self.records = {name: Record() for name in members}
        self.pending_states = {name: _PendingHiddenStates() for name in state_members}
        self.rest_s = DecayedMean(_SMOOTHING)  # time between two commits without drafting
        self.draft_s = 0.0  # drafting since the last commit
        self._committed_at = now

    @property
    def proposed(self) -> tuple[int, ...]:
        return self.proposal_request.new_tokens(self.proposal)

    @property
    def proposal_request(self) -> DraftRequest:
        """Return the request for a chain. It may become a branch of a tree, and then begins at the committed tokens."""
        request = self.request
        if request.branches == 1:
            return request
        return replace(
            request,
            tokens=request.tokens[: request.committed],
            max_new_tokens=request.depth,
            open_guess=Guess(request.committed, 0, 0, ()),
            branches=1,
        )

    def branch(self) -> tuple[tuple[int, ...], int]:
        """Return the tokens that join a model's tree, within half of the budget, and how many are not open yet."""
        if self.request.branches == 1:
            return (), 0
        _, known = self.request.open_guess.walk(self.proposed)
        branch = self.proposed[: known + self.request.budget // 2]
        return branch, len(branch) - known

    def committed(self, now: float) -> None:
        """Update the time between two commits."""
        self.rest_s.add(max(0.0, now - self._committed_at - self.draft_s))
        self._committed_at, self.draft_s = now, 0.0


class BlendDrafter:
    """Drafter made of at least two members, named by their kinds."""

    def __init__(self, members: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._members = dict(members)
        self._clock = clock
        self._proposers = {name: member for name, member in members.items() if isinstance(member, Proposer)}
        self._models = [name for name in members if name not in self._proposers]
        self._state_members = [name for name, member in members.items() if member.needs_hidden_states]
        self.needs_hidden_states = bool(self._state_members)
        self.reads_context = any(getattr(member, "reads_context", False) for member in members.values())
        self.target_width = max(getattr(member, "target_width", 0) for member in members.values())
        self.vocab_limit = min(getattr(member, "vocab_limit", MAX_IDS) for member in members.values())
        _check_same_target(self._members)
        vocabularies = (member.vocabulary for member in members.values())
        self.vocabulary: Vocabulary | None = next(filter(None, vocabularies), None)
        projections = (getattr(member, "projection", None) for member in members.values())
        self.projection = next(filter(None, projections), None)
        self._records = {name: Record() for name in members}
        self._seconds = {name: Rate() for name in self._models}  # per level of a draft
        self._first_s: dict[str, float] = {}  # the first time of each, until there is a second one
        self._rest_s: float | None = None  # latest measurement of any session, for new sessions
        self._sessions: dict[str, _SessionState] = {}

    @property
    def info(self) -> ModelInfo:
        """Return the info of the first member with a vocabulary, with the target that any member is trained for."""
        infos = {name: member.info for name, member in self._members.items()}
        first = min(infos, key=lambda name: (name in self._proposers, self._members[name].vocabulary is None))
        fingerprint = hashlib.sha256("+".join(info.fingerprint for info in infos.values()).encode()).hexdigest()[:32]
        target = max(info.target_digest for info in infos.values())  # of all that have one, the same
        return replace(infos[first], name="+".join(infos), fingerprint=fingerprint, target_digest=target)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        sessions = [self._decide(request) for request in requests]
        drafted = self._run_models(sessions)
        return [self._result(session, drafted.get(session.request.session)) for session in sessions]

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)
        for member in self._members.values():
            member.forget(session)

    # Selection of the source.

    def _decide(self, request: DraftRequest) -> _SessionState:
        """Return the session with the decision for its request."""
        session = self._sessions.get(request.session)
        if session is None:
            session = _SessionState(request, list(self._members), self._state_members, self._clock())
            self._sessions[request.session] = session
        session.request = request
        if new := session.accuracy.update(request, (session.records, self._records)):
            session.committed(self._clock())
            self._rest_s = session.rest_s.value
            for model in self._models:
                session.records[model].hits.recover(_HIT_RATE_PRIOR, new)
                self._records[model].hits.recover(_HIT_RATE_PRIOR, new / len(self._sessions))
        for pending in session.pending_states.values():
            pending.add(request.hidden_states)
        session.proposer, session.proposal = self._best_proposal(session)
        levels, estimate = session.request.max_new_tokens, partial(self._estimate, session)
        session.models = tuple(sorted(self._models, key=lambda it: estimate(it).with_model(levels), reverse=True))
        session.source = self._choose_source(session)
        return session

    def _best_proposal(self, session: _SessionState) -> tuple[str, Guess]:
        """Return the best proposer and its chain, with the expected accepted tokens corrected by its record."""
        request = session.proposal_request
        best_name, best = "", request.chain(done=True)
        for name, proposer in self._proposers.items():
            proposal = proposer.propose(request)
            length = len(request.new_tokens(proposal))
            session.accuracy.record_chain(name, request, proposal)
            expected = session.records[name].expected_accepted(proposal.expected, self._records[name])
            if length and expected > best.expected:
                best_name, best = name, replace(proposal, expected=min(expected, float(length)))
            elif not best_name and not proposal.done:
                best = replace(proposal, expected=0.0)  # its indexing is not complete: it must be called again
        return best_name, best

    def _choose_source(self, session: _SessionState) -> _DraftSource:
        request, expected, tokens = session.request, session.proposal.expected, len(session.proposed)
        if not session.models or not tokens:
            return _DraftSource.MODEL if session.models else _DraftSource.PROPOSAL
        estimate = self._estimate(session, session.models[0])
        levels = request.max_new_tokens
        model_speed = estimate.with_model(levels)
        if request.branches > 1 and estimate.depth:
            # The open tree already has levels, and the proposal is another branch of it: continue, or stop here.
            stop_speed = estimate.tokens_per_s(max(estimate.open_accepted, expected), 0)
            return _DraftSource.MODEL if model_speed > stop_speed else _DraftSource.PROPOSAL
        left = max(0, levels - tokens)
        continued = full_acceptance_probability(expected, tokens) * estimate.chain(left)
        mixed_speed = estimate.tokens_per_s(estimate.with_proposal(expected + continued), left)
        speeds = {
            _DraftSource.PROPOSAL: estimate.tokens_per_s(estimate.with_proposal(expected), 0),
            _DraftSource.PROPOSAL_THEN_MODEL: mixed_speed if left else 0.0,
            _DraftSource.MODEL: model_speed,
        }
        return max(speeds, key=lambda source: speeds[source])

    def _estimate(self, session: _SessionState, model: str) -> RoundEstimate:
        request = session.request
        seconds, depth = self._seconds[model], len(request.tokens) - request.committed
        level_s = seconds.total / seconds.weight if seconds.weight else 0.0
        rest_s = session.rest_s.value if session.rest_s.known else self._rest_s
        return RoundEstimate(
            hit_rate=session.records[model].hits.value(self._records[model].hits.value(_HIT_RATE_PRIOR)),
            depth=depth,
            level_s=level_s,
            # Before the first measurement, the rest of a round counts as much as the model's draft.
            rest_s=(depth + request.max_new_tokens) * level_s if rest_s is None else rest_s,
        )

    # Drafting.

    def _run_models(self, sessions: Sequence[_SessionState]) -> dict[str, Guess]:
        """Return the models' drafts by session; a model without a draft gives way to the next best."""
        drafts: dict[str, Guess] = {}
        started = self._clock()
        waiting = [session for session in sessions if session.source is _DraftSource.MODEL]
        for rank in range(len(self._models)):
            for model in self._models:
                requests = [self._model_request(session, model) for session in waiting if session.models[rank] == model]
                if requests:
                    drafts |= self._run_model(model, requests)
            waiting = [session for session in waiting if not _usable(session, drafts[session.request.session])]
        spent = self._clock() - started
        for session in sessions:
            session.draft_s += spent
        return drafts

    def _run_model(self, model: str, requests: Sequence[DraftRequest]) -> dict[str, Guess]:
        started = self._clock()
        drafts = self._members[model].draft(requests)
        spent_s = self._clock() - started
        for request, draft in zip(requests, drafts, strict=True):
            self._sessions[request.session].accuracy.record_tokens(model, request, draft)
        reads_prompt = any(not self._sessions[request.session].records[model].hits.weight for request in requests)
        self._record_time(model, spent_s, max(map(DraftRequest.new_levels, requests, drafts)), reads_prompt)
        return {request.session: draft for request, draft in zip(requests, drafts, strict=True)}

    def _record_time(self, model: str, spent_s: float, levels: int, reads_prompt: bool) -> None:
        """Record the time of a draft. Until one is known, those in which a model reads a prompt do not count."""
        known = self._seconds[model]
        if not levels or (reads_prompt and not known.weight):
            return
        usual = known.total / known.weight if known.weight else self._first_s.pop(model, None)
        if usual is None:  # a first time that stood for itself may have been a stall
            self._first_s[model] = spent_s / levels
        else:
            known.add(min(spent_s, _OUTLIER * usual * levels), levels)

    def _model_request(self, session: _SessionState, model: str) -> DraftRequest:
        pending = session.pending_states.get(model)
        request = replace(session.request, hidden_states=pending.take() if pending is not None else ())
        _, missing = session.branch()
        if not missing:
            return request
        # Keep budget and a branch for the proposal, which joins the finished tree.
        budget = request.budget - missing
        levels = min(request.max_new_tokens, budget)
        return replace(request, budget=budget, branches=request.branches - 1, max_new_tokens=levels)

    def _result(self, session: _SessionState, drafted: Guess | None) -> Guess:
        request = session.request
        if drafted is not None and _usable(session, drafted):
            branch, missing = session.branch()
            return _joined(request, drafted, branch, missing) if missing else drafted
        if request.branches > 1:
            # A proposal is a chain from the committed tokens; its proposer may draft a tree instead.
            proposer = self._proposers.get(session.proposer)
            guess = proposer.propose(request) if proposer is not None else request.chain(done=session.proposal.done)
        else:
            guess = session.proposal
        if not request.new_tokens(guess):
            return guess
        return replace(guess, done=session.source is not _DraftSource.PROPOSAL_THEN_MODEL)


def _check_same_target(members: Mapping[str, Drafter]) -> None:
    vocabularies = {name: member.vocabulary for name, member in members.items() if member.vocabulary is not None}
    targets = {name: member.info.target_digest for name, member in members.items() if member.info.target_digest}
    states = {name: getattr(each, "projection", None) for name, each in members.items() if each.needs_hidden_states}
    for kind, values in (("vocabularies", vocabularies), ("targets", targets), ("hidden states", states)):
        first = next(iter(values), "")
        other = next((name for name in values if values[name] != values[first]), None)
        if other is not None:
            why = f": {first} and {other} have different {kind}"
            raise StartupError.of("kind", "+".join(members), "members for one target", why)


def _usable(session: _SessionState, draft: Guess) -> bool:
    """Return whether a draft has new tokens or asks for another call."""
    return bool(session.request.new_tokens(draft)) or not draft.done


def _joined(request: DraftRequest, guess: Guess, branch: tuple[int, ...], missing: int) -> Guess:
    """Return the model's guess, with the proposal as a branch once the model has drafted all that it may."""
    depth = max(guess.shape.depths[len(request.open_guess.tokens) :], default=0)
    if not guess.done and depth < request.depth and len(request.new_tokens(guess)) < request.budget - missing:
        return guess
    tokens, parents = list(guess.tokens), list(guess.shape.parents)
    most = len(request.open_guess.tokens) + request.budget
    node, known = guess.walk(branch)
    for token in branch[known:]:
        if len(tokens) >= most or parents.count(node) >= request.branches:
            break
        tokens.append(token)
        parents.append(node)
        node = len(tokens) - 1
    return Guess(guess.position, 0, 0, tuple(tokens), parents=tuple(parents), done=True)
