"""Growing a tree of guesses where it is likeliest to come true. Pure: the drafters with branches bring the numbers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from drafter.interface import DraftRequest, DraftResult

ROOT = -1  # the place after what is committed

Choice = tuple[int, float]  # a token, and the logarithm of its probability to follow


class TreeBuilder:
    """One session's open guesses, and what a drafter adds to them for one ask.

    Node i is the ask's open guess i, then come the new ones in the order in
    which they were added. A drafter offers what may follow a node, and `add`
    takes the offer with the largest product of probabilities along its path.
    Offers are cheap: all places may be offered for, the limits are kept here.
    """

    def __init__(self, ask: DraftRequest) -> None:
        self.tokens = list(ask.open_tokens)
        self.parents = list(ask.open_parents)
        self._first_new = len(self.tokens)
        self._branches = ask.branches
        self._calibration = ask.calibration
        self._least_share = ask.share
        self._budget = ask.budget
        self._depth = ask.depth
        self._depths: list[int] = []
        self._children: dict[int, dict[int, int]] = {}  # of each place: node by token
        for node in range(len(self.tokens)):
            self._place(node)
        self._scores = [-math.inf] * len(self.tokens)  # until a place's offer tells; parents are offered for first
        self._offers: list[tuple[float, int, int, int]] = []
        self._offered = 0

    @property
    def room(self) -> int:
        """How many more nodes may be added."""
        return self._budget - (len(self.tokens) - self._first_new)

    @property
    def share(self) -> int:
        """How many to add now if deeper levels are to get as many: for a drafter that sees one level at a time."""
        levels = self._depth - max(self._depths, default=0)
        return max(self._least_share, self.room // levels) if levels > 0 else self.room

    def depth(self, place: int) -> int:
        """How far a place is past what is committed: 0 for ROOT."""
        return 0 if place == ROOT else self._depths[place]

    def path(self, place: int) -> list[int]:
        """The tokens from what is committed to a place."""
        path: list[int] = []
        while place != ROOT:
            path.append(self.tokens[place])
            place = self.parents[place]
        return path[::-1]

    def score(self, place: int) -> float:
        """Logarithm of the probability that a place's path comes true."""
        return 0.0 if place == ROOT else self._scores[place]

    def open_places(self) -> list[int]:
        """ROOT and the nodes that may get children, parents first."""
        return [place for place in range(ROOT, len(self.tokens)) if self.depth(place) < self._depth]

    def offer(self, place: int, choices: Sequence[Choice]) -> None:
        """What may follow a place, likeliest first. A place that is offered for must have been scored by its parent's
        offer or be ROOT; nodes that an offer does not name count as likely as its last."""
        children = self._children.get(place, {})
        base = self.score(place)
        self._learn(place, choices)
        choices = [(token, self._calibration.score(rank, share)) for rank, (token, share) in enumerate(choices)]
        said = dict(choices)
        for token, node in children.items():
            self._scores[node] = base + said.get(token, choices[-1][1] if choices else -math.inf)
        if self.depth(place) >= self._depth:
            return
        for token, logprob in choices[: self._branches]:
            if token not in children:
                heapq.heappush(self._offers, (-(base + logprob), self._offered, place, token))
                self._offered += 1  # of equals, the first offered

    def _learn(self, place: int, choices: Sequence[Choice]) -> None:
        """What is said of a place that nobody was offered for before."""
        if place not in self._children:
            for rank, (_, share) in enumerate(choices[: self._branches]):
                self._calibration.offered(rank, share)

    def add(self, least: float = -math.inf) -> int | None:
        """Take the likeliest offer of at least this score: its node; None when there is none or no room."""
        while self._offers and self.room > 0:
            score, _, place, token = self._offers[0]
            if -score < least:
                return None
            heapq.heappop(self._offers)
            if len(self._children.get(place, {})) < self._branches:
                self.tokens.append(token)
                self.parents.append(place)
                self._scores.append(-score)
                self._place(len(self.tokens) - 1)
                return len(self.tokens) - 1
        return None

    def draft(self, *, done: bool = False) -> DraftResult:
        """What was added."""
        return DraftResult(tuple(self.tokens[self._first_new :]), (), done, tuple(self.parents[self._first_new :]))

    def _place(self, node: int) -> None:
        parent = self.parents[node]
        self._depths.append(self.depth(parent) + 1)
        self._children.setdefault(parent, {})[self.tokens[node]] = node
