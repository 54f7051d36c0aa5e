"""The shape of a tree of tokens, apart from the tokens.

One convention holds everywhere: `parents[i]` is the index of node i's parent in the same list, an earlier node, or
ROOT (−1) for the place from which the tree grows. On the wire the numbers are one higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1


@dataclass(frozen=True)
class TreeShape:
    """Parents of the nodes of a tree; a parent comes before its children."""

    parents: tuple[int, ...] = ()

    @classmethod
    def of(cls, parents: Sequence[int], num_nodes: int) -> TreeShape:
        """Return the shape of a guess: a chain where it states no parents."""
        return cls(tuple(parents) if parents else tuple(range(ROOT, num_nodes - 1)))

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def stated(self) -> tuple[int, ...]:
        """Return the parents as messages and engines take them: none for a chain."""
        return () if self.is_chain else self.parents

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the distance of each node from ROOT, 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Return the length of the longest path."""
        return max(self.depths, default=0)

    def token_paths(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each node the tokens from ROOT to it."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes that lead from ROOT to `node`, without ROOT."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
