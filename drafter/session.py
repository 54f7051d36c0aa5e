"""One session at the drafter: what is committed, the tree of open guesses, and what of it has been sent."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from drafter.interface import DraftRequest, DraftResult
from outrider.protocol.checks import check_tokens
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import (
    MAX_FEATURE_ROWS,
    MAX_GAMMA,
    NO_STEERING,
    Distribution,
    Guess,
    HiddenStates,
    Steering,
    check_opening,
)

MAX_TREE = 128  # guesses of a session that are open at the same time
MAX_UNREAD = 256  # messages; a peer that is so far behind is drafted for no further
ASK_US = 4_000  # what one ask of an eager session may take, about: commits take effect between two
EAGER_SHARE = 8  # guesses that an eager session adds to a tree at once: the likeliest, wherever they are
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class DraftOpening:
    """What a stream's first message says."""

    session_id: str
    epoch: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    vocab_size: int
    steering: Steering = NO_STEERING
    cache_salt: str = ""
    vocabulary_digest: str = ""
    eos_token_ids: tuple[int, ...] = ()

    def check(self) -> None:
        if self.vocab_size < 1:
            raise InvalidRequest.of("open.vocab_size", self.vocab_size, "at least 1")
        check_opening(
            self.session_id,
            self.tokens,
            self.prompt_length,
            self.params,
            self.steering,
            self.vocab_size,
            self.cache_salt,
        )
        check_tokens("open.eos_token_ids", self.eos_token_ids, self.vocab_size)


class _Fate(enum.Enum):
    OPEN = enum.auto()
    HELD = enum.auto()  # committed, just as guessed
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class _OpenGuess:
    """A guessed token."""

    token: int
    position: int
    parent: _OpenGuess | None  # None: hangs from what is committed
    draft_prob: Distribution | None
    node_id: int = 0  # given when it is sent
    fate: _Fate = _Fate.OPEN


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """What the numbers of an ask stand for."""

    committed: int
    tip: _OpenGuess | None  # where `ask.tokens` ends
    nodes: tuple[_OpenGuess, ...]


class DraftSession:
    """Owned by the loop; the stream reads `outbox`, which ends with None."""

    def __init__(
        self, opening: DraftOpening, calibration: Calibration | None = None, rails: GrammarCursor | None = None
    ) -> None:
        self.id = opening.session_id
        self.key = f"{opening.session_id}@{opening.epoch}@{id(self)}"
        self.params = opening.params
        self._cache_salt = opening.cache_salt
        self.outbox: asyncio.Queue[Guess | None] = asyncio.Queue()
        self._vocab_size = opening.vocab_size
        self._prompt_length = opening.prompt_length
        self._committed = list(opening.tokens)
        self._tree: list[_OpenGuess] = []  # parents before children
        self._asked = _PendingRequest(len(self._committed), None, ())
        self._features: list[HiddenStates] = []
        self._gamma = 0
        self._branches = 1
        self._nodes = 0
        self._eager = False
        self._exhausted = False
        self._passed_at = -1
        self._next_id = 1
        self._draft_us = 0
        self._calibration = calibration or Calibration()
        self._rails = rails
        self._step_us = 0.0  # per token of a chain, or per level of a tree
        self.steer(opening.steering)

    def ask(self) -> DraftRequest | None:
        """What the drafter is to do for this session now."""
        if not self._wants_more:
            return None
        tip = self._tip
        path = self._path(tip)
        features, self._features = tuple(self._features), []
        at = {id(node): i for i, node in enumerate(self._tree)}
        self._asked = _PendingRequest(len(self._committed), tip, tuple(self._tree))
        return DraftRequest(
            session=self.key,
            tokens=self._committed + path,
            committed=len(self._committed),
            prompt_length=self._prompt_length,
            room=max(1, min(self._depth - len(path), self._budget, self._stride)),
            params=self.params,
            vocab_size=self._vocab_size,
            cache_salt=self._cache_salt,
            open_tokens=tuple(node.token for node in self._tree),
            open_parents=tuple(-1 if node.parent is None else at[id(node.parent)] for node in self._tree),
            branches=self._siblings,
            budget=self._budget,
            depth=self._depth,
            share=EAGER_SHARE if self._eager else 1,
            features=features,
            calibration=self._calibration,
            rails=self._rails,
        )

    def take(self, draft: DraftResult, spent_us: int) -> None:
        """The answer to the last ask: add to the tree what still fits; send it when it is as large as it may be or
        nothing more will come."""
        asked = self._asked
        places: list[_OpenGuess | None] = [None, *asked.nodes]
        under = asked.tip
        for i, token in enumerate(draft.tokens):
            if draft.parents:
                under = places[draft.parents[i] + 1]
            position = asked.committed if under is None else under.position + 1
            under = self._plant(token, position, under, draft.draft_probs[i] if draft.draft_probs else None)
            places.append(under)
        if asked.committed == len(self._committed):
            self._exhausted = draft.done
        self._draft_us += spent_us
        if draft.tokens:
            positions = [place.position for place in places[1 + len(asked.nodes) :] if place is not None]
            steps = max(positions) - min(positions) + 1
            self._step_us += _SMOOTHING * (spent_us / steps - self._step_us)
        if self._eager or not self._wants_more:
            self._send()

    def commit(self, position: int, tokens: tuple[int, ...], features: HiddenStates | None = None) -> None:
        """The target has spoken: keep the tree as far as it agrees, drop the rest."""
        known = len(self._committed)
        if position > known:
            raise InvalidRequest.of("committed.position", position, f"at most {known}, the tokens known here")
        new = tokens[known - position :]
        check_tokens("committed.tokens", new, self._vocab_size)
        if features is not None:
            self._keep(features)
        for token in new:
            self._advance(token)
            self._exhausted = False

    def _keep(self, features: HiddenStates) -> None:
        """For the next ask; of what comes while nothing is asked only the newest."""
        self._features.append(features)
        while sum(len(kept.rows) // (2 * kept.width) for kept in self._features) > MAX_FEATURE_ROWS:
            self._features.pop(0)

    def steer(self, steering: Steering) -> None:
        steering.check()
        if steering.gamma is not None:
            self._gamma = steering.gamma
        if steering.branches is not None:
            self._branches = max(1, steering.branches)
        if steering.nodes is not None:
            self._nodes = steering.nodes
        if steering.eager is not None:
            self._eager = steering.eager
        if steering.gamma is not None or steering.branches is not None or steering.nodes is not None:
            self._exhausted = False

    @property
    def _depth(self) -> int:
        """How far ahead of what is committed a guess is of use."""
        last_useful = self._prompt_length + self.params.max_tokens - 1
        return min(self._gamma, last_useful - len(self._committed))

    @property
    def _budget(self) -> int:
        """How many more guesses may be open."""
        return min(self._nodes or self._gamma * self._siblings, MAX_TREE) - len(self._tree)

    @property
    def _stride(self) -> int:
        """Tokens, or levels of a tree, to ask for at once."""
        return max(1, int(ASK_US / max(self._step_us, 1.0))) if self._eager else MAX_GAMMA

    @property
    def _siblings(self) -> int:
        # A drawn token has none: choosing among several by value would bias the text.
        return 1 if self.params.mode.needs_draft_probs else self._branches

    @property
    def _wants_more(self) -> bool:
        if self._exhausted or self._depth <= 0 or self._budget <= 0 or self.outbox.qsize() > MAX_UNREAD:
            return False
        return self._deepest < self._depth or (self._eager and self._siblings > 1)

    @property
    def _deepest(self) -> int:
        tip = self._tip
        return 0 if tip is None else tip.position + 1 - len(self._committed)

    @property
    def _tip(self) -> _OpenGuess | None:
        """The end of the longest chain; of equals the first, which is the likeliest."""
        return max(self._tree, key=lambda node: node.position, default=None)

    def _path(self, tip: _OpenGuess | None) -> list[int]:
        path: list[int] = []
        while tip is not None:
            path.append(tip.token)
            tip = tip.parent
        return path[::-1]

    def _plant(self, token: int, position: int, under: _OpenGuess | None, prob: Distribution | None) -> _OpenGuess:
        """A drafted token in its place: what was asked for may have been committed meanwhile, or not come true."""
        node = _OpenGuess(token, position, under, prob)
        if under is not None and under.fate is _Fate.GONE:
            node.fate = _Fate.GONE
        elif position < len(self._committed):
            node.fate = _Fate.HELD if self._committed[position] == token else _Fate.GONE
        else:
            node.parent = under if under is not None and under.fate is _Fate.OPEN else None
            twin = next((other for other in self._tree if other.parent is node.parent and other.token == token), None)
            if twin is not None:
                return twin
            self._tree.append(node)
        return node

    def _advance(self, token: int) -> None:
        """One more token is committed."""
        self._committed.append(token)
        guessed = [node.token for node in self._tree if node.parent is None]
        self._calibration.judged(len(guessed), guessed.index(token) if token in guessed else None)
        kept: list[_OpenGuess] = []
        for node in self._tree:
            if node.parent is None:
                node.fate = _Fate.HELD if node.token == token else _Fate.GONE
            elif node.parent.fate is _Fate.GONE:
                node.fate = _Fate.GONE
            else:
                kept.append(node)
                if node.parent.fate is _Fate.HELD:
                    node.parent = None
        self._tree = kept

    def _send(self) -> None:
        unsent = [node for node in self._tree if not node.node_id]
        # One message for all that hangs from the same place: a step of the verifier sees all of it or nothing.
        while unsent:
            unsent = self._send_below(unsent[0].parent, unsent)
        position = len(self._committed)
        if not self._wants_more and self._deepest < self._depth and self._passed_at < position:
            self._passed_at = position
            self.outbox.put_nowait(Guess(position, 0, 0, (), draft_us=self._spent()))

    def _send_below(self, top: _OpenGuess | None, unsent: list[_OpenGuess]) -> list[_OpenGuess]:
        """Send all that hangs from `top`, directly or not; what is left."""
        numbers: dict[int, int] = {id(top): 0}
        sent: list[_OpenGuess] = []
        left: list[_OpenGuess] = []
        for node in unsent:
            if id(node.parent) in numbers and len(sent) < MAX_GAMMA:
                sent.append(node)
                numbers[id(node)] = len(sent)
            else:
                left.append(node)
        parents = tuple(numbers[id(node.parent)] for node in sent)
        first_id = self._next_id
        for node in sent:
            node.node_id = self._next_id
            self._next_id += 1
        self.outbox.put_nowait(
            Guess(
                position=sent[0].position,
                first_id=first_id,
                parent=0 if top is None else top.node_id,
                tokens=tuple(node.token for node in sent),
                draft_probs=tuple(node.draft_prob for node in sent if node.draft_prob is not None),
                draft_us=self._spent(),
                parents=() if parents == tuple(range(len(sent))) else parents,
            )
        )
        return left

    def _spent(self) -> int:
        spent, self._draft_us = self._draft_us, 0
        return spent
