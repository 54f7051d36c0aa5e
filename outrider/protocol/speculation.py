"""Guesses and the shapes of their trees, verdicts and steering: the messages of each round of a session."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import TypeVar

from outrider.protocol import checks
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.earlier_states import EarlierStates
from outrider.protocol.hidden_states.messages import HiddenStates, StateSpecs
from outrider.protocol.sampling_params import SamplingParams

MAX_GAMMA = 64
MAX_BRANCHES = 8
MAX_NODES = 256  # guesses of a session that are open at the same time
MAX_CANDIDATES = 64  # ids of a guess's distribution
MAX_DRAFT_WAIT_US = 10_000_000
WHOLE = 65536  # sum of a Distribution's weights
ROOT = -1  # parent of the first nodes of a tree

Value = TypeVar("Value")
Item = TypeVar("Item")


class TokenKind(enum.IntEnum):
    """Origin of a committed token."""

    NONE = 0
    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    PLAIN = 4


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class DraftSteering:
    """New settings of a session's drafter; None leaves a setting unchanged."""

    gamma: int | None = None  # how far to guess beyond the committed tokens
    branches: int | None = None
    nodes: int | None = None  # open guesses; 0: γ × branches
    eager: bool | None = None  # send guesses as they are drafted

    def check(self) -> None:
        _check_all(gamma=(self.gamma, MAX_GAMMA), branches=(self.branches, MAX_BRANCHES), nodes=(self.nodes, MAX_NODES))


@dataclass(frozen=True, slots=True)
class VerifySteering:
    """New settings of a session's verifier; None leaves a setting unchanged."""

    gamma: int | None = None  # length of the guessed path that a step waits for
    draft_wait_us: int | None = None
    nodes: int | None = None  # guesses checked per step; 0: no limit for this session
    paying_nodes: int | None = None  # unless 0, in place of `nodes`: as many as pay for the time that they add
    hidden_states: bool | None = None  # send them with verdicts
    states: StateSpecs | None = None  # send these with verdicts as well
    earlier_states: EarlierStates | None = None  # send these once
    plain_steps: int | None = None  # steps without guesses that may share a verdict

    def check(self) -> None:
        _check_all(
            gamma=(self.gamma, MAX_GAMMA),
            draft_wait_us=(self.draft_wait_us, MAX_DRAFT_WAIT_US),
            nodes=(self.nodes, MAX_NODES),
            paying_nodes=(self.paying_nodes, MAX_NODES),
            plain_steps=(self.plain_steps, MAX_GAMMA),
        )
        for asked in (self.states, self.earlier_states):
            if asked is not None:
                asked.check()


def _check_all(**settings: tuple[int | None, int]) -> None:
    for name, (value, high) in settings.items():
        if value is not None:
            checks.check_number(f"steer.{name}", value, 0, high)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Sparse distribution in integer parts of 65536: small on the wire, exact at both ends."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]

    def check(self, name: str, vocab_size: int) -> None:
        if len(self.ids) != len(self.weights) or not self.ids:
            found = f"{len(self.ids)} ids and {len(self.weights)} weights"
            raise InvalidRequest.of(name, found, "as many weights as ids, at least one")
        if any(b <= a for a, b in pairwise(self.ids)):
            raise InvalidRequest.of(f"{name}.id_deltas", "not ascending", "ascending ids, each once")
        checks.check_token(f"{name}.id_deltas", self.ids[0], vocab_size)
        checks.check_token(f"{name}.id_deltas", self.ids[-1], vocab_size)
        if min(self.weights) < 1 or sum(self.weights) != WHOLE:
            found = f"a sum of {sum(self.weights)}"
            raise InvalidRequest.of(f"{name}.weights", found, f"parts of at least 1 that sum to {WHOLE}")


@dataclass(frozen=True)
class TreeShape:
    """The shape of a tree of tokens, apart from the tokens.

    One convention holds everywhere: `parents[i]` is the index of node i's parent in the same list, an earlier node, or
    ROOT for the place from which the tree grows. On the wire the numbers are one higher.
    """

    parents: tuple[int, ...] = ()

    @classmethod
    def of(cls, parents: Sequence[int], num_nodes: int) -> TreeShape:
        """Return the shape of a guess: a chain where it states no parents."""
        if not parents and num_nodes <= MAX_NODES:
            return _chain(num_nodes)
        return cls(tuple(parents) if parents else tuple(range(ROOT, num_nodes - 1)))

    def accumulate(self, items: Iterable[Item], combine: Callable[[Value, Item], Value], start: Value) -> list[Value]:
        """Return each node's value: its parent's value combined with its own item. ROOT's value is `start`."""
        values: list[Value] = []
        for item, parent in zip(items, self.parents, strict=True):
            values.append(combine(values[parent] if parent >= 0 else start, item))
        return values

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the distance of each node from ROOT, 1 for its children."""
        return tuple(self.accumulate(self.parents, lambda depth, _: depth + 1, 0))

    @cached_property
    def depth(self) -> int:
        """Return the length of the longest path."""
        return max(self.depths, default=0)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Return for each node the nodes from ROOT to it, itself included."""
        return self.token_paths(range(len(self.parents)))

    def token_paths(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each node the tokens from ROOT to it."""
        start: tuple[int, ...] = ()
        return self.accumulate(tokens, lambda path, token: (*path, token), start)

    def below(self, top: int, nodes: Iterable[int]) -> list[int]:
        """Return those of `nodes`, in ascending order, that descend from `top` through one another."""
        inside = {top}
        found: list[int] = []
        for node in nodes:
            if self.parents[node] in inside:
                inside.add(node)
                found.append(node)
        return found


@cache
def _chain(num_nodes: int) -> TreeShape:
    return TreeShape(tuple(range(ROOT, num_nodes - 1)))


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes that lead from ROOT to `node`, without ROOT."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True)
class Guess:
    """Tokens for position, position+1, … in a chain, or in a tree with `parents`; see Guess in common.proto.

    `done` and `expected` are for the drafter's loop and are not sent.
    """

    position: int
    first_id: int
    parent: int
    tokens: tuple[int, ...]
    draft_probs: tuple[Distribution, ...] = ()
    draft_us: int = 0
    source: int = 0
    parents: tuple[int, ...] = ()  # as in TreeShape; a chain states none
    done: bool = False  # its drafter has nothing to add before the next commit
    expected: float = 0.0  # tokens that its drafter expects to be accepted

    def __post_init__(self) -> None:
        if self.parents and self.parents == tuple(range(ROOT, len(self.tokens) - 1)):
            object.__setattr__(self, "parents", ())

    @cached_property
    def shape(self) -> TreeShape:
        return TreeShape.of(self.parents, len(self.tokens))

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Return the guessed tokens that lead to each row of its logits; row 0 precedes token 0."""
        return [(), *self.shape.token_paths(self.tokens)]

    @cached_property
    def tip(self) -> int:
        """Return the end of the longest path, of the first and thus likeliest among equals; ROOT without tokens."""
        depths = self.shape.depths
        return max(range(len(depths)), key=depths.__getitem__, default=ROOT)

    @cached_property
    def children(self) -> Mapping[int, Mapping[int, int]]:
        """Return by node its children by their tokens, in order."""
        children: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.shape.parents, strict=True)):
            children.setdefault(parent, {})[token] = node
        return children

    def walk(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Follow tokens from ROOT; return the last node that agrees, and its depth."""
        node = ROOT
        for depth, token in enumerate(tokens):
            siblings = self.children.get(node, {})
            if token not in siblings:
                return node, depth
            node = siblings[token]
        return node, len(tokens)

    def part(self, top: int, nodes: Sequence[int], first_id: int = 0, parent: int = 0, draft_us: int = 0) -> Guess:
        """Return a guess of these nodes alone; those whose parents are left out hang from node `top`."""
        number = {node: i for i, node in enumerate(nodes)}
        return Guess(
            self.position + (self.shape.depths[top] if top >= 0 else 0),
            first_id,
            parent,
            tuple([self.tokens[node] for node in nodes]),
            tuple([self.draft_probs[node] for node in nodes]) if self.draft_probs else (),
            draft_us,
            parents=tuple([number.get(self.shape.parents[node], ROOT) for node in nodes]),
        )


NO_GUESS = Guess(0, 0, 0, ())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)  # not frozen, see Verdict
class VerifyTimings:
    wait_us: int = 0
    step_us: int = 0
    sessions: int = 1
    batch_tokens: int = 1
    session_tokens: int = 1
    cached_tokens: int = 0
    step_tokens: int = 0
    draft_us: int = 0  # of a drafter in the verifier's process


@dataclass(frozen=True, slots=True)
class SourceTally:
    """Tally of one drafter's guesses in a step."""

    source: int
    proposed: int  # length of its longest path that was checked
    accepted: int  # accepted tokens that it had guessed


@dataclass(slots=True)  # made for every token: a frozen one takes several times as long to make
class Verdict:
    """Tokens that one verifier step committed for one session; of several steps, `timings` are the last one's."""

    position: int
    tokens: tuple[int, ...]
    accepted: int
    last: TokenKind
    proposed: int = 0
    finish_reason: FinishReason = FinishReason.NONE
    timings: VerifyTimings = field(default_factory=VerifyTimings)
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_states: HiddenStates | None = None
    layer_states: tuple[HiddenStates, ...] = ()
    sources: tuple[SourceTally, ...] = ()
    nodes: int = 0  # guesses that were checked, all branches together
    remaining_depth: int = 0  # longest guessed path after the committed tokens
    accepted_from_branch: int = 0  # accepted guesses that were not the first for their position

    @property
    def steps(self) -> int:
        """Return how many steps it stands for: several without guesses may share it."""
        return max(1, len(self.tokens) - self.accepted)

    @property
    def is_plain(self) -> bool:
        return self.last is TokenKind.PLAIN and self.hidden_states is None and not self.layer_states

    @property
    def kinds(self) -> tuple[TokenKind, ...]:
        return (TokenKind.ACCEPTED,) * self.accepted + (self.last,) * (len(self.tokens) - self.accepted)


def joined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return plain verdicts as one."""
    first, last = verdicts[0], verdicts[-1]
    if first is last:
        return first
    return replace(
        last,
        position=first.position,
        tokens=tuple(chain.from_iterable(each.tokens for each in verdicts)),
        logprobs=tuple(chain.from_iterable(each.logprobs for each in verdicts)),
        timings=replace(
            last.timings,
            cached_tokens=first.timings.cached_tokens,
            draft_us=sum(each.timings.draft_us for each in verdicts),
        ),
    )


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """Content of the first message of a session's stream that all workers get."""

    session_id: str
    epoch: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams

    def check_for(self, vocab_size: int, steering: DraftSteering | VerifySteering, cache_salt: str) -> None:
        """Raise InvalidRequest for the first invalid field."""
        if not 1 <= len(self.session_id) <= checks.MAX_ID_CHARACTERS:
            raise InvalidRequest.of("open.session_id", self.session_id, f"1 to {checks.MAX_ID_CHARACTERS} characters")
        if not self.tokens:
            raise InvalidRequest.of("open.tokens", "empty", "at least one token")
        if not 1 <= self.prompt_length <= len(self.tokens):
            raise InvalidRequest.of("open.prompt_length", self.prompt_length, f"in [1, {len(self.tokens)}]")
        checks.check_tokens("open.tokens", self.tokens, vocab_size)
        checks.check_count("open.cache_salt", len(cache_salt), checks.MAX_SALT_CHARACTERS, "characters")
        self.params.check(vocab_size)
        steering.check()
        if self.params.seed is None:
            raise InvalidRequest.of("params.seed", "absent", "given: only the coordinator draws one")
