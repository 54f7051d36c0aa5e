"""Several ways to draft as one: who drafts next is decided for each session by how right each has been, and how fast.

A member without a model proposes for nothing, so it always does; whether its
proposal is taken, or a member with a model drafts instead or behind it, is
decided by the tokens per second that each is likely to bring. Under rejection
and block the decision is made before anything is drawn, from the past alone,
and what is drawn is used.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from drafter.accuracy import AccuracyTracker, Rate, Record, placed
from drafter.confidence import Confident, Proposal
from drafter.interface import Drafter, DraftRequest, DraftResult
from drafter.tree_builder import ROOT
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import HiddenStates
from outrider.protocol.vocabulary import Vocabulary

_MAX_FEATURES = 4096  # positions whose hidden states are kept for a member that does not draft
_HIT_RATE = 0.8  # of a model that is not known yet: hopeful, so that it is tried
_SMOOTHING = 0.2
_NOTHING = Proposal(DraftResult(done=True), 0.0)


class _Member(enum.Enum):
    """How an ask is answered."""

    FREE = enum.auto()  # by the proposal
    MIXED = enum.auto()  # by the proposal, and a model goes on behind it
    MODEL = enum.auto()


@dataclass(frozen=True, slots=True)
class _Plan:
    ask: DraftRequest
    proposer: str
    proposal: Proposal
    models: tuple[str, ...]  # who drafts otherwise, the best first
    way: _Member = _Member.FREE

    @property
    def model(self) -> str:
        return self.models[0] if self.models else ""


class _KeptGuesses:
    """Hidden states that a member has not been given yet, the oldest of too many dropped."""

    def __init__(self) -> None:
        self._parts: deque[HiddenStates] = deque()
        self._positions = 0

    def add(self, parts: Sequence[HiddenStates]) -> None:
        for part in parts:
            self._parts.append(part)
            self._positions += _positions(part)
        while self._positions > _MAX_FEATURES and len(self._parts) > 1:
            self._positions -= _positions(self._parts.popleft())

    def take(self) -> tuple[HiddenStates, ...]:
        taken = tuple(self._parts)
        self._parts.clear()
        self._positions = 0
        return taken


@dataclass(frozen=True, slots=True)
class _Odds:
    """What a round may bring in which a model has drafted so many levels already, and what it costs."""

    hit_rate: float
    depth: int  # levels that are open
    level_s: float
    rest_s: float

    def chain(self, length: int) -> float:
        """Tokens that hold of a model's chain."""
        return sum(self.hit_rate**i for i in range(1, length + 1))

    @property
    def so_far(self) -> float:
        return self.chain(self.depth)

    def with_more(self, expected: float) -> float:
        """`expected` of what is added, if all that is open holds."""
        return self.so_far + self.hit_rate**self.depth * expected

    def of_model(self, levels: int) -> float:
        return self.chain(self.depth + levels)

    def speed(self, expected: float, levels: int) -> float:
        """Tokens a second, the target's own with them, after so many levels more."""
        return (1 + expected) / max(self.rest_s + (self.depth + levels) * self.level_s, 1e-9)


class _Session:
    def __init__(self, ask: DraftRequest, members: Sequence[str], wanting: Sequence[str], now: float) -> None:
        self.judge = AccuracyTracker(ask.committed)
        self.records = {name: Record() for name in members}
        self.kept = {name: _KeptGuesses() for name in wanting}
        self.rest_s: float | None = None  # between two commits, what is not drafting
        self.spent_s = 0.0  # drafting since the last commit
        self._heard_at = now

    def heard(self, now: float) -> None:
        """Something was committed."""
        rest = max(0.0, now - self._heard_at - self.spent_s)
        self.rest_s = rest if self.rest_s is None else self.rest_s + _SMOOTHING * (rest - self.rest_s)
        self._heard_at, self.spent_s = now, 0.0


class BlendDrafter:
    """Members by their kind, at least two."""

    def __init__(self, members: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._members = dict(members)
        self._clock = clock
        self._free = [name for name, member in members.items() if isinstance(member, Confident)]
        self._models = [name for name in members if name not in self._free]
        self._wanting = [name for name, member in members.items() if member.wants_features]
        self._check()
        self.vocabulary: Vocabulary | None = next(
            (member.vocabulary for member in members.values() if member.vocabulary is not None), None
        )
        self._records = {name: Record() for name in members}
        self._seconds = {name: Rate() for name in self._models}  # per level of a draft
        self._rest_s: float | None = None  # as a session last had it, for those that are new
        self._sessions: dict[str, _Session] = {}

    @property
    def info(self) -> ModelInfo:
        """The numbers of the first member that has a vocabulary, and the target that any of them was made for."""
        infos = {name: member.info for name, member in self._members.items()}
        whole = hashlib.sha256("+".join(info.fingerprint for info in infos.values()).encode()).hexdigest()[:32]
        by_weight = sorted(infos, key=lambda name: (name in self._free, self._members[name].vocabulary is None))
        made_for = {info.made_for for info in infos.values()} - {""}
        return replace(
            infos[by_weight[0]],
            name="+".join(self._members),
            fingerprint=whole,
            made_for=next(iter(made_for), ""),
        )

    @property
    def wants_features(self) -> bool:
        return bool(self._wanting)

    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        plans = [self._plan(ask) for ask in asks]
        drafted = self._drafted(plans)
        return [self._answer(plan, drafted.get(plan.ask.session)) for plan in plans]

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)
        for member in self._members.values():
            member.forget(session)

    # Deciding.

    def _plan(self, ask: DraftRequest) -> _Plan:
        session = self._sessions.get(ask.session)
        if session is None:
            session = _Session(ask, list(self._members), self._wanting, self._clock())
            self._sessions[ask.session] = session
        if session.judge.hear(ask, (session.records, self._records)):
            session.heard(self._clock())
            self._rest_s = session.rest_s
        for kept in session.kept.values():
            kept.add(ask.features)
        proposer, proposal = self._best_proposal(session, ask)
        plan = _Plan(ask, proposer, proposal, self._ranked(session, ask))
        return replace(plan, way=self._way(session, plan))

    def _best_proposal(self, session: _Session, ask: DraftRequest) -> tuple[str, Proposal]:
        """The most promising chain that is to be had for nothing, with what is to be expected of it by experience."""
        from_here = ask if ask.branches == 1 else _from_committed(ask)
        best = ("", _NOTHING)
        for name in self._free:
            proposal = self._propose(name, from_here)
            tokens = proposal.draft.tokens
            session.judge.promise(name, from_here, tokens, proposal.expected)
            likely = session.records[name].likely(proposal.expected, self._records[name])
            if tokens and likely > best[1].expected:
                best = name, Proposal(proposal.draft, min(likely, float(len(tokens))))
            elif not best[0] and not proposal.draft.done:
                best = "", Proposal(proposal.draft, 0.0)  # it has not read all yet and wants to be asked again
        return best

    def _propose(self, name: str, ask: DraftRequest) -> Proposal:
        member = self._members[name]
        if isinstance(member, Confident):
            return member.propose(ask)
        draft = member.draft([ask])[0]
        return Proposal(draft, float(len(draft.tokens)))

    def _way(self, session: _Session, plan: _Plan) -> _Member:
        ask, model, proposal = plan.ask, plan.model, plan.proposal
        tokens = len(proposal.draft.tokens)
        if not model or not tokens:
            return _Member.MODEL if model else _Member.FREE
        odds = self._odds(session, ask, model)
        if ask.branches > 1 and odds.depth:
            # A tree is under way, and the proposal another branch of it: go on, or is that enough?
            enough = odds.speed(max(odds.so_far, proposal.expected), 0)
            return _Member.MODEL if odds.speed(odds.of_model(ask.room), ask.room) > enough else _Member.FREE
        left = max(0, ask.room - tokens)
        behind = _all_hold(proposal.expected, tokens) * odds.chain(left)
        speeds = {
            _Member.FREE: odds.speed(odds.with_more(proposal.expected), 0),
            _Member.MIXED: odds.speed(odds.with_more(proposal.expected + behind), left) if left else 0.0,
            _Member.MODEL: odds.speed(odds.of_model(ask.room), ask.room),
        }
        return max(speeds, key=lambda way: speeds[way])

    def _ranked(self, session: _Session, ask: DraftRequest) -> tuple[str, ...]:
        def speed(name: str) -> float:
            odds = self._odds(session, ask, name)
            return odds.speed(odds.of_model(ask.room), ask.room)

        return tuple(sorted(self._models, key=speed, reverse=True))

    def _odds(self, session: _Session, ask: DraftRequest, model: str) -> _Odds:
        seconds, depth = self._seconds[model], len(ask.tokens) - ask.committed
        level_s = seconds.good / seconds.all if seconds.all else 0.0
        rest_s = self._rest_s if session.rest_s is None else session.rest_s
        return _Odds(
            hit_rate=session.records[model].hit_rate(self._records[model], _HIT_RATE),
            depth=depth,
            level_s=level_s,
            # Before anything is known of the rest of a round, it counts as much as a model's draft.
            rest_s=(depth + ask.room) * level_s if rest_s is None else rest_s,
        )

    # Drafting.

    def _drafted(self, plans: Sequence[_Plan]) -> dict[str, DraftResult]:
        """What the models draft, by session. One that has nothing to say now gives way to the next best."""
        drafts: dict[str, DraftResult] = {}
        started = self._clock()
        open_plans = [plan for plan in plans if plan.way is _Member.MODEL]
        for rank in range(len(self._models)):
            for model in self._models:
                asks = [self._model_ask(plan, model) for plan in open_plans if plan.models[rank] == model]
                if asks:
                    drafts |= self._drafted_by(model, asks)
            open_plans = [plan for plan in open_plans if not _says_something(drafts[plan.ask.session])]
        spent = self._clock() - started
        for plan in plans:
            self._sessions[plan.ask.session].spent_s += spent
        return drafts

    def _drafted_by(self, model: str, asks: Sequence[DraftRequest]) -> dict[str, DraftResult]:
        started = self._clock()
        drafts = self._members[model].draft(asks)
        spent = self._clock() - started
        levels = 0
        for ask, draft in zip(asks, drafts, strict=True):
            self._sessions[ask.session].judge.drafted(model, ask, draft)
            levels = max(levels, len({position for position, _, _ in placed(ask, draft)}))
        if levels:
            self._seconds[model].add(spent, levels)
        return {ask.session: draft for ask, draft in zip(asks, drafts, strict=True)}

    def _model_ask(self, plan: _Plan, model: str) -> DraftRequest:
        ask = plan.ask
        kept = self._sessions[ask.session].kept.get(model)
        ask = replace(ask, features=kept.take() if kept is not None else ())
        missing = _Branch(plan).missing
        if not missing:
            return ask
        # The proposal joins the tree when that is done.
        return replace(
            ask, budget=ask.budget - missing, branches=ask.branches - 1, room=min(ask.room, ask.budget - missing)
        )

    def _answer(self, plan: _Plan, drafted: DraftResult | None) -> DraftResult:
        if drafted is not None and _says_something(drafted):
            branch = _Branch(plan)
            return branch.joined(drafted) if branch.missing else drafted
        if plan.ask.branches > 1 and plan.proposer:
            # The same member's tree; it has one only if it branches, else its chain from the longest guess.
            draft = self._members[plan.proposer].draft([plan.ask])[0]
        else:
            draft = plan.proposal.draft
        if not draft.tokens and not draft.done:
            return draft
        return replace(draft, done=plan.way is not _Member.MIXED or not draft.tokens)

    def _check(self) -> None:
        """Members must be for the same target."""
        members = self._members.items()
        spoken = {name: member.vocabulary for name, member in members if member.vocabulary is not None}
        made_for = {name: member.info.made_for for name, member in members if member.info.made_for}
        for what, said in (("speak different vocabularies", spoken), ("were made for different targets", made_for)):
            first = next(iter(said), "")
            other = next((name for name in said if said[name] != said[first]), None)
            if other is not None:
                raise StartupError(
                    f"{first} and {other} {what}",
                    field="kind",
                    value="+".join(self._members),
                    limit="members for one target",
                )


def _says_something(draft: DraftResult) -> bool:
    """Tokens, or that it wants to be asked again."""
    return bool(draft.tokens) or not draft.done


def _positions(features: HiddenStates) -> int:
    return len(features.rows) // (2 * features.width)


def _from_committed(ask: DraftRequest) -> DraftRequest:
    """As if nothing were open: for a chain that may become a branch."""
    return replace(
        ask,
        tokens=ask.tokens[: ask.committed],
        room=ask.depth,
        open_tokens=(),
        open_parents=(),
        branches=1,
    )


class _Branch:
    """The proposal as a branch of the tree that a model drafts."""

    def __init__(self, plan: _Plan) -> None:
        self._ask = plan.ask
        self._tree: dict[int, dict[int, int]] = {}  # of each place: node by token
        self._size = 0
        self._grow(plan.ask.open_tokens, plan.ask.open_parents)
        tokens = plan.proposal.draft.tokens if plan.ask.branches > 1 else ()
        _, known = self._walk(tokens)
        # Half of what may be added is the model's.
        self._tokens = tokens[: known + plan.ask.budget // 2]
        self.missing = len(self._tokens) - known

    def joined(self, drafted: DraftResult) -> DraftResult:
        """The model's draft, and this branch besides once the model has drafted all that it may."""
        ask = self._ask
        deepest = max((position for position, _, _ in placed(ask, drafted)), default=0) + 1 - ask.committed
        if not drafted.done and deepest < ask.depth and len(drafted.tokens) < ask.budget - self.missing:
            return drafted
        parents = list(drafted.parents or self._chain(drafted))
        tokens = list(drafted.tokens)
        self._grow(drafted.tokens, parents)
        place, known = self._walk(self._tokens)
        for token in self._tokens[known:]:
            if len(tokens) >= ask.budget or len(self._tree.get(place, {})) >= ask.branches:
                break
            tokens.append(token)
            parents.append(place)
            self._grow((token,), (place,))
            place = self._size - 1
        return DraftResult(tuple(tokens), (), True, tuple(parents))

    def _grow(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        for token, parent in zip(tokens, parents, strict=True):
            self._tree.setdefault(parent, {})[token] = self._size
            self._size += 1

    def _walk(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the tree ends along a path, and after how many tokens."""
        place = ROOT
        for known, token in enumerate(tokens):
            node = self._tree.get(place, {}).get(token)
            if node is None:
                return place, known
            place = node
        return place, len(tokens)

    def _chain(self, drafted: DraftResult) -> list[int]:
        """Parents of a draft that goes on where the longest open guess ends."""
        tip, _ = self._walk(self._ask.tokens[self._ask.committed :])
        first = len(self._ask.open_tokens)
        return [tip, *range(first, first + len(drafted.tokens) - 1)][: len(drafted.tokens)]


def _all_hold(expected: float, tokens: int) -> float:
    """The chance that a whole chain holds of which so much is expected, were the chances along it on a line."""
    return max(0.0, 1 - (1 - min(expected / tokens, 1.0)) * 2 * tokens / (tokens + 1))
