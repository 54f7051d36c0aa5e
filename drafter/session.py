"""One session at the drafter: requests to the drafting method, commits, and guesses to send."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from drafter.calibration import Calibration
from drafter.grammar import GrammarCursor
from drafter.interface import DraftRequest, DraftResult
from drafter.open_guesses import OpenGuess, OpenGuesses
from outrider.protocol.checks import check_tokens
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import (
    MAX_GAMMA,
    MAX_HIDDEN_POSITIONS,
    ROOT,
    DraftSteering,
    Guess,
    HiddenStates,
    TreeShape,
    check_opening,
)

MAX_TREE = 128  # open guesses of a session
MAX_UNREAD = 256  # messages; drafting pauses for a peer that is further behind
EAGER_REQUEST_US = 4_000  # target duration of one request of an eager session: commits take effect between two
EAGER_MIN_PER_LEVEL = 8  # guesses that an eager session adds to a tree at once: the likeliest ones of any level
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class DraftOpening:
    """Content of a stream's first message."""

    session_id: str
    epoch: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    vocab_size: int
    steering: DraftSteering = field(default_factory=DraftSteering)
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


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """State at the time of a request, to which the indices in its result refer."""

    committed: int
    tip: OpenGuess | None  # end of `DraftRequest.tokens`
    nodes: tuple[OpenGuess, ...]


class DraftSession:
    """Session state, owned by the loop. The stream reads `outbox`, which ends with None."""

    def __init__(
        self,
        opening: DraftOpening,
        calibration: Calibration | None = None,
        grammar_cursor: GrammarCursor | None = None,
    ) -> None:
        self.id = opening.session_id
        self.key = f"{opening.session_id}@{opening.epoch}@{id(self)}"
        self.params = opening.params
        self.outbox: asyncio.Queue[Guess | None] = asyncio.Queue()
        self._cache_salt = opening.cache_salt
        self._vocab_size = opening.vocab_size
        self._prompt_length = opening.prompt_length
        self._calibration = calibration or Calibration()
        self._grammar_cursor = grammar_cursor
        self._guesses = OpenGuesses(opening.tokens, self._calibration)
        self._pending = _PendingRequest(len(opening.tokens), None, ())
        self._hidden_states: list[HiddenStates] = []
        self._gamma = 0
        self._branches = 1
        self._nodes = 0
        self._eager = False
        self._exhausted = False  # the drafter has nothing to add before the next commit
        self._passed_at = -1  # committed position at which the last empty guess was sent
        self._next_id = 1
        self._draft_us = 0
        self._step_us = 0.0  # per token of a chain, or per level of a tree
        self.steer(opening.steering)

    def next_request(self) -> DraftRequest | None:
        """Return the request for the drafting method; None if the session needs no guesses now."""
        if not self._wants_more:
            return None
        guesses = self._guesses
        tip = guesses.tip
        path = guesses.path(tip)
        hidden_states, self._hidden_states = tuple(self._hidden_states), []
        self._pending = _PendingRequest(len(guesses.committed), tip, tuple(guesses.nodes))
        return DraftRequest(
            session=self.key,
            tokens=guesses.committed + path,
            committed=len(guesses.committed),
            prompt_length=self._prompt_length,
            max_new_tokens=max(1, min(self._depth - len(path), self._budget, self._max_steps)),
            params=self.params,
            vocab_size=self._vocab_size,
            cache_salt=self._cache_salt,
            open_tokens=tuple(node.token for node in guesses.nodes),
            open_parents=guesses.parents(),
            branches=self._siblings,
            budget=self._budget,
            depth=self._depth,
            min_per_level=EAGER_MIN_PER_LEVEL if self._eager else 1,
            hidden_states=hidden_states,
            calibration=self._calibration,
            grammar_cursor=self._grammar_cursor,
        )

    def add_result(self, result: DraftResult, spent_us: int) -> None:
        """Add the result of the last request to the tree; send the tree once it is complete."""
        pending = self._pending
        nodes: list[OpenGuess | None] = [None, *pending.nodes]
        parent = pending.tip
        for i, token in enumerate(result.tokens):
            if result.parents:
                parent = nodes[result.parents[i] + 1]
            position = pending.committed if parent is None else parent.position + 1
            draft_prob = result.draft_probs[i] if result.draft_probs else None
            parent = self._guesses.insert(token, position, parent, draft_prob)
            nodes.append(parent)
        if pending.committed == len(self._guesses.committed):
            self._exhausted = result.done
        self._draft_us += spent_us
        if result.tokens:
            positions = [node.position for node in nodes[1 + len(pending.nodes) :] if node is not None]
            steps = max(positions) - min(positions) + 1
            self._step_us += _SMOOTHING * (spent_us / steps - self._step_us)
        if self._eager or not self._wants_more:
            self._send()

    def commit(self, position: int, tokens: tuple[int, ...], hidden_states: HiddenStates | None = None) -> None:
        """Append the target's tokens; keep the part of the tree that agrees with them."""
        known = len(self._guesses.committed)
        if position > known:
            raise InvalidRequest.of("committed.position", position, f"at most {known}, the tokens known here")
        new = tokens[known - position :]
        check_tokens("committed.tokens", new, self._vocab_size)
        if hidden_states is not None:
            self._buffer(hidden_states)
        for token in new:
            self._guesses.commit(token)
            self._exhausted = False

    def steer(self, steering: DraftSteering) -> None:
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

    def _buffer(self, hidden_states: HiddenStates) -> None:
        """Keep hidden states for the next request; without requests, only the newest positions."""
        self._hidden_states.append(hidden_states)
        while sum(len(kept.rows) // (2 * kept.width) for kept in self._hidden_states) > MAX_HIDDEN_POSITIONS:
            self._hidden_states.pop(0)

    @property
    def _depth(self) -> int:
        """Return how far beyond the committed position a guess can still be accepted."""
        last_useful = self._prompt_length + self.params.max_tokens - 1
        return min(self._gamma, last_useful - len(self._guesses.committed))

    @property
    def _budget(self) -> int:
        """Return how many more guesses may be open."""
        return min(self._nodes or self._gamma * self._siblings, MAX_TREE) - len(self._guesses.nodes)

    @property
    def _max_steps(self) -> int:
        """Return the tokens of a chain, or levels of a tree, for one request."""
        return max(1, int(EAGER_REQUEST_US / max(self._step_us, 1.0))) if self._eager else MAX_GAMMA

    @property
    def _siblings(self) -> int:
        # Sampled guesses have no siblings: a choice among them by value would bias the text.
        return 1 if self.params.mode.needs_draft_probs else self._branches

    @property
    def _wants_more(self) -> bool:
        if self._exhausted or self._depth <= 0 or self._budget <= 0 or self.outbox.qsize() > MAX_UNREAD:
            return False
        return self._guesses.depth < self._depth or (self._eager and self._siblings > 1)

    def _send(self) -> None:
        unsent = [node for node in self._guesses.nodes if not node.node_id]
        # One message per subtree, so that a step of the verifier sees all of it or nothing.
        while unsent:
            unsent = self._send_below(unsent[0].parent, unsent)
        position = len(self._guesses.committed)
        if not self._wants_more and self._guesses.depth < self._depth and self._passed_at < position:
            # An empty guess: the verifier need not wait for more at this position.
            self._passed_at = position
            self.outbox.put_nowait(Guess(position, 0, 0, (), draft_us=self._take_draft_us()))

    def _send_below(self, top: OpenGuess | None, unsent: list[OpenGuess]) -> list[OpenGuess]:
        """Send the descendants of `top`; return the nodes that remain."""
        numbers: dict[int, int] = {id(top): ROOT}
        sent: list[OpenGuess] = []
        remaining: list[OpenGuess] = []
        for node in unsent:
            if id(node.parent) in numbers and len(sent) < MAX_GAMMA:
                sent.append(node)
                numbers[id(node)] = len(sent) - 1
            else:
                remaining.append(node)
        shape = TreeShape(tuple(numbers[id(node.parent)] for node in sent))
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
                draft_us=self._take_draft_us(),
                parents=shape.stated,
            )
        )
        return remaining

    def _take_draft_us(self) -> int:
        spent, self._draft_us = self._draft_us, 0
        return spent
