"""Growth of a tree of guesses where it is likeliest to be accepted. Pure: drafting methods supply the probabilities."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from drafter.interface import DraftRequest
from outrider.protocol.speculation import ROOT, Guess, path_to

Choice = tuple[int, float]  # a token and the logarithm of its probability


class TreeBuilder:
    """Open guesses of one session, and the nodes that a drafter adds for one request.

    Node i is the request's open guess i; new nodes follow in the order in which they are added. A drafter states the
    choices after a node, and `add` takes the choice with the largest product of probabilities along its path. Choices
    are cheap: a drafter may state them for all nodes, and the limits are enforced here.
    """

    def __init__(self, request: DraftRequest) -> None:
        self._request = request
        self.tokens = list(request.open_guess.tokens)
        self.parents = list(request.open_guess.shape.parents)
        self._first_new = len(self.tokens)
        self._depths: list[int] = []
        self._children: dict[int, dict[int, int]] = {}  # by parent: child node by token
        for node in range(len(self.tokens)):
            self._index(node)
        self._scores = [-math.inf] * len(self.tokens)  # set by the parent's choices
        self._choices: list[tuple[float, int, int, int]] = []  # heap of (−score, order, parent, token)
        self._num_choices = 0

    @property
    def remaining(self) -> int:
        """Return how many more nodes may be added."""
        return self._request.budget - (len(self.tokens) - self._first_new)

    @property
    def level_budget(self) -> int:
        """Return how many nodes to add now so that as many remain for each deeper level."""
        levels = self._request.depth - max(self._depths, default=0)
        return max(self._request.min_per_level, self.remaining // levels) if levels > 0 else self.remaining

    def depth(self, node: int) -> int:
        """Return the distance of a node from the committed position: 0 for ROOT."""
        return 0 if node == ROOT else self._depths[node]

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from the committed position to a node."""
        return tuple(self.tokens[each] for each in path_to(node, self.parents))

    def score(self, node: int) -> float:
        """Return the log-probability that a node's path is accepted."""
        return 0.0 if node == ROOT else self._scores[node]

    def expandable_nodes(self) -> list[int]:
        """Return ROOT and the nodes that may get children, parents first."""
        return [node for node in range(ROOT, len(self.tokens)) if self.depth(node) < self._request.depth]

    def add_choices(self, node: int, choices: Sequence[Choice]) -> None:
        """State what may follow a node, likeliest first.

        The node must be ROOT or a child whose parent's choices are stated.
        Existing children that are not among the choices get the last score.
        """
        calibration, branches = self._request.calibration, self._request.branches
        children = self._children.get(node, {})
        base = self.score(node)
        if node not in self._children:  # recorded once per node
            for rank, (_, logprob) in enumerate(choices[:branches]):
                calibration.record_proposed(rank, logprob)
        scored = [(token, calibration.score(rank, logprob)) for rank, (token, logprob) in enumerate(choices)]
        scores, least = dict(scored), scored[-1][1] if scored else -math.inf
        for token, child in children.items():
            self._scores[child] = base + scores.get(token, least)
        if self.depth(node) >= self._request.depth:
            return
        for token, score in scored[:branches]:
            if token not in children:
                heapq.heappush(self._choices, (-(base + score), self._num_choices, node, token))
                self._num_choices += 1  # ties: the first one stated

    def add(self, min_score: float = -math.inf) -> int | None:
        """Add the likeliest choice of at least this score; return its node, or None if there is none or no budget."""
        while self._choices and self.remaining > 0:
            score, _, parent, token = self._choices[0]
            if -score < min_score:
                return None
            heapq.heappop(self._choices)
            if len(self._children.get(parent, {})) < self._request.branches:
                self.tokens.append(token)
                self.parents.append(parent)
                self._scores.append(-score)
                self._index(len(self.tokens) - 1)
                return len(self.tokens) - 1
        return None

    def guess(self, *, done: bool = False) -> Guess:
        """Return the open guesses with the nodes that were added."""
        return Guess(self._request.committed, 0, 0, tuple(self.tokens), parents=tuple(self.parents), done=done)

    def _index(self, node: int) -> None:
        parent = self.parents[node]
        self._depths.append(self.depth(parent) + 1)
        self._children.setdefault(parent, {})[self.tokens[node]] = node
