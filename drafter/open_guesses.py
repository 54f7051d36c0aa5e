"""The tree of a session's open guesses, kept consistent with the committed tokens."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from drafter.calibration import Calibration
from outrider.protocol.speculation import Distribution


class GuessState(enum.Enum):
    OPEN = enum.auto()
    ACCEPTED = enum.auto()  # committed as guessed
    DROPPED = enum.auto()


@dataclass(slots=True, eq=False)
class OpenGuess:
    """A guessed token; `parent` None means that it follows the committed tokens."""

    token: int
    position: int
    parent: OpenGuess | None
    draft_prob: Distribution | None
    node_id: int = 0  # assigned when it is sent
    state: GuessState = GuessState.OPEN


class OpenGuesses:
    """Committed tokens of a session, and the open guesses after them."""

    def __init__(self, committed: Sequence[int], calibration: Calibration) -> None:
        self.committed = list(committed)
        self.nodes: list[OpenGuess] = []  # parents before children
        self._calibration = calibration

    @property
    def tip(self) -> OpenGuess | None:
        """Return the end of the longest chain; among equals the first, which is the likeliest."""
        return max(self.nodes, key=lambda node: node.position, default=None)

    @property
    def depth(self) -> int:
        """Return the length of the longest chain."""
        tip = self.tip
        return 0 if tip is None else tip.position + 1 - len(self.committed)

    def path(self, node: OpenGuess | None) -> list[int]:
        """Return the tokens from the committed position to a node."""
        path: list[int] = []
        while node is not None:
            path.append(node.token)
            node = node.parent
        return path[::-1]

    def parents(self) -> tuple[int, ...]:
        """Return each node's parent as an index into `nodes`, −1 for the committed position."""
        index = {id(node): i for i, node in enumerate(self.nodes)}
        return tuple(-1 if node.parent is None else index[id(node.parent)] for node in self.nodes)

    def insert(self, token: int, position: int, parent: OpenGuess | None, prob: Distribution | None) -> OpenGuess:
        """Insert a drafted token; its position or its parent may have been committed or dropped since the request."""
        node = OpenGuess(token, position, parent, prob)
        if parent is not None and parent.state is GuessState.DROPPED:
            node.state = GuessState.DROPPED
        elif position < len(self.committed):
            node.state = GuessState.ACCEPTED if self.committed[position] == token else GuessState.DROPPED
        else:
            node.parent = parent if parent is not None and parent.state is GuessState.OPEN else None
            twin = next((other for other in self.nodes if other.parent is node.parent and other.token == token), None)
            if twin is not None:
                return twin
            self.nodes.append(node)
        return node

    def commit(self, token: int) -> None:
        """Append a committed token; drop the guesses that it contradicts."""
        self.committed.append(token)
        guessed = [node.token for node in self.nodes if node.parent is None]
        self._calibration.record_outcome(len(guessed), guessed.index(token) if token in guessed else None)
        kept: list[OpenGuess] = []
        for node in self.nodes:
            if node.parent is None:
                node.state = GuessState.ACCEPTED if node.token == token else GuessState.DROPPED
            elif node.parent.state is GuessState.DROPPED:
                node.state = GuessState.DROPPED
            else:
                kept.append(node)
                if node.parent.state is GuessState.ACCEPTED:
                    node.parent = None
        self.nodes = kept
