"""The guess tree of one session, rooted at the committed prefix.

The verifier has one per session. Guesses arrive in any order and at any time. Tokens that were committed in the
meantime are skipped, guesses that no longer match are pruned, and equal guesses share a node. A node is identified by
its drafter (`source`) and the drafter's id for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from outrider.base.decayed_mean import DecayedMean
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.speculation import MAX_GAMMA, MAX_NODES, ROOT, Distribution, Guess, SourceTally

NodeKey = tuple[int, int]

# These limits bound the memory that a drafter can use.
MAX_NAMES = 16  # of one node
MAX_HELD = 16_384  # committed guesses that later ones may hang from, and drafters


@dataclass(slots=True, eq=False)
class Node:
    """A guessed token that matches the committed prefix so far; the root stands for the prefix itself."""

    token: int
    position: int
    draft_prob: Distribution | None = None
    children: dict[int, Node] = field(default_factory=dict)  # by token, in order of arrival
    rank: int = 0  # among its siblings
    keys: list[NodeKey] = field(default_factory=list)


# Acceptance rates by rank before a session has data. Drafters send their likeliest guess first.
_PRIOR_RATES = (0.7, 0.1, 0.05)
_PRIOR_TRIALS = 8.0
_RATE_WEIGHT = 0.01


class SiblingRates:
    """The acceptance rates of the first guess for a position, of the second, and so on, with decay."""

    def __init__(self) -> None:
        self._by_rank = [DecayedMean(_RATE_WEIGHT, rate, _PRIOR_TRIALS) for rate in _PRIOR_RATES]

    def __getitem__(self, rank: int) -> float:
        return self._by_rank[min(rank, len(self._by_rank) - 1)].value

    def record(self, siblings: int, accepted: int | None) -> None:
        """Record a commit at a position with `siblings` guesses: the rank of the accepted one, or None."""
        for rank, rate in enumerate(self._by_rank[:siblings]):
            rate.add(float(accepted == rank))


# A parent node and the position after it.
Place = tuple[Node, int]


def tallies(nodes: Sequence[Node], depths: Sequence[int], accepted: Sequence[int]) -> tuple[SourceTally, ...]:
    """Return the tally of each drafter with guesses among the verified `nodes`; `accepted` are the rows of the path."""
    longest: dict[int, int] = {}
    num_accepted: dict[int, int] = {}
    for row, (node, depth) in enumerate(zip(nodes, depths, strict=True), start=1):
        drawn = node.draft_prob is not None
        if drawn and longest and node.keys[0][0] not in longest:
            break  # drawn ones count for the first drafter: of the others only what is equal to them is checked
        for source in dict(node.keys[: 1 if drawn else None]):  # each once
            longest[source] = max(depth, longest.get(source, 0))
            num_accepted[source] = num_accepted.get(source, 0) + (row in accepted)
    return tuple([SourceTally(source, longest[source], num_accepted[source]) for source in sorted(longest)])


class GuessTree:
    """A tree over `committed`, the session's own list of tokens, which it reads and never writes.

    With `single` (rejection and block) a step checks one chain, of each node's children the first to arrive: a choice
    among drawn tokens by value would bias the text. What others have drawn waits for the case that the first one fails.
    """

    def __init__(
        self, committed: Sequence[int], *, single: bool, max_nodes: int = MAX_NODES, max_ahead: int = MAX_GAMMA
    ) -> None:
        self._committed = committed
        self._breadth = 1 if single else None
        self._max_nodes = max_nodes
        self._max_ahead = max_ahead
        self._root = Node(-1, len(committed) - 1)
        self._nodes: dict[NodeKey, Node] = {}
        self._committed_guesses: dict[NodeKey, int] = {}  # → position
        self._highest: dict[int, int] = {}
        self._size = 0
        self._depth: int | None = 0  # None: not known since the last change
        self.rates = SiblingRates()
        self.passed_at = -1  # a drafter has reported that it has no guess for this position

    def add(self, guess: Guess) -> int:
        """Add the tokens that match, and return how many were new. Raises InvalidRequest for a protocol violation."""
        parent, after = self._locate(guess)
        self._check_ids(guess)
        if after is None:
            return 0  # its parent was not committed
        if guess.position != after:
            raise InvalidRequest.of("guess.position", guess.position, f"{after}, one past its parent")
        if not guess.tokens:
            self.passed_at = max(self.passed_at, min(guess.position, len(self._committed)))  # until the next commit
            return 0
        before = self._size
        self._depth = None
        start: Place | None = (parent, after)
        guess.shape.accumulate(range(len(guess.tokens)), partial(self._put, guess), start)
        return self._size - before

    def _put(self, guess: Guess, place: Place | None, i: int) -> Place | None:
        """Put token i of a guess at its place. Return that of its children; None: no match, or a limit is reached."""
        if place is None:
            return None
        parent, position = place
        key = (guess.source, guess.first_id + i)
        if position < len(self._committed):  # committed already: skipped if it is equal
            if self._committed[position] != guess.tokens[i]:
                return None
            self._keep_committed({key: position})
            return self._root, position + 1
        if position >= len(self._committed) + self._max_ahead:
            return None
        node = parent.children.get(guess.tokens[i])
        if node is None:
            if self._size >= self._max_nodes:
                return None
            draft_prob = guess.draft_probs[i] if guess.draft_probs else None
            node = Node(guess.tokens[i], position, draft_prob, rank=len(parent.children))
            parent.children[node.token] = node
            self._size += 1
        if len(node.keys) < MAX_NAMES:
            node.keys.append(key)
            self._nodes[key] = node
        return node, position + 1

    def commit(self, tokens: Sequence[int]) -> None:
        """Move the root along `tokens`, which the caller has appended to `committed`, and prune the rest."""
        self._depth = None
        committed: dict[NodeKey, int] = {}
        for token in tokens:
            guessed = self._root.children
            kept = guessed.pop(token, None)
            if guessed or kept is not None:
                self.rates.record(len(guessed) + (kept is not None), None if kept is None else kept.rank)
            for node in guessed.values():
                self._drop(node)
            self._root = kept or Node(token, self._root.position + 1)
            if kept is not None:
                self._size -= 1
                for key in kept.keys:
                    self._nodes.pop(key, None)
                    committed[key] = kept.position
        self._keep_committed(committed)

    def block(self, max_rows: int, max_depth: int, *, chain: bool = False) -> Guess:
        """Return the part of the tree that a step verifies: up to `max_rows` guesses, the likeliest first.

        None is deeper than `max_depth`. `chain` leaves branches out: each guess hangs from the one before it.
        """
        if not self._root.children:
            return Guess(len(self._committed), 0, 0, ())
        parents: list[int] = []
        nodes: list[Node] = []
        seen = 0  # orders equal probabilities
        reached = [(-1.0, seen, self._root, ROOT, 0)]  # negative probability, order, node, its parent's index, depth
        while reached and len(nodes) < max_rows:
            negated, _, node, parent, depth = heapq.heappop(reached)
            if node is not self._root:
                parents.append(parent)
                nodes.append(node)
            if chain:
                reached.clear()
            for child in islice(node.children.values(), self._breadth) if depth < max_depth else ():
                seen += 1
                heapq.heappush(reached, (negated * self.rates[child.rank], seen, child, len(nodes) - 1, depth + 1))
        draft_probs = tuple([node.draft_prob for node in nodes if node.draft_prob is not None])
        tokens = tuple([node.token for node in nodes])
        return Guess(len(self._committed), 0, 0, tokens, draft_probs, parents=tuple(parents))

    def nodes(self, block: Guess) -> list[Node]:
        """Return the nodes of a block from this tree; there must have been no commit since."""
        return block.shape.accumulate(block.tokens, lambda node, token: node.children[token], self._root)

    @property
    def depth(self) -> int:
        """Return the length of the longest chain that a step may check."""
        if self._depth is None:
            self._depth, level = -1, [self._root]
            while level:
                self._depth += 1
                level = [child for node in level for child in islice(node.children.values(), self._breadth)]
        return self._depth

    def _locate(self, guess: Guess) -> tuple[Node, int | None]:
        """Return a guess's parent node and the position after it; the position is None if the parent was pruned."""
        length = len(self._committed)
        if guess.parent == 0:
            if guess.position > length:
                limit = f"at most {length}, the committed length, when it has no parent"
                raise InvalidRequest.of("guess.position", guess.position, limit)
            return self._root, guess.position
        key = (guess.source, guess.parent)
        node = self._nodes.get(key)
        if node is not None:
            return node, node.position + 1
        if key in self._committed_guesses:
            return self._root, self._committed_guesses[key] + 1
        if guess.parent > self._highest.get(guess.source, 0):
            raise InvalidRequest.of("guess.parent", guess.parent, "0 or the id of a token guessed earlier")
        return self._root, None

    def _check_ids(self, guess: Guess) -> None:
        if not guess.tokens:
            return
        if guess.first_id < 1:
            raise InvalidRequest.of("guess.first_id", guess.first_id, "at least 1")
        if guess.parent >= guess.first_id:
            raise InvalidRequest.of("guess.parent", guess.parent, f"below first_id {guess.first_id}")
        if len(self._highest) == MAX_HELD and guess.source not in self._highest:
            raise InvalidRequest.of("guess.source", guess.source, f"one of at most {MAX_HELD} of a session")
        self._highest[guess.source] = max(self._highest.get(guess.source, 0), guess.first_id + len(guess.tokens) - 1)

    def _keep_committed(self, positions: Mapping[NodeKey, int]) -> None:
        self._committed_guesses |= positions
        while len(self._committed_guesses) > MAX_HELD:
            del self._committed_guesses[next(iter(self._committed_guesses))]

    def _drop(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self._size -= 1
            for key in node.keys:
                self._nodes.pop(key, None)
