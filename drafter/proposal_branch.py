"""A proposed chain as a branch of the tree that a model drafts."""

from __future__ import annotations

from collections.abc import Sequence

from drafter.accuracy import token_positions
from drafter.interface import DraftRequest, DraftResult
from outrider.protocol.speculation import ROOT


class ProposalBranch:
    """The part of a proposed chain that the open guesses do not contain."""

    def __init__(self, request: DraftRequest, tokens: tuple[int, ...]) -> None:
        self._request = request
        self._children: dict[int, dict[int, int]] = {}  # by parent: child node by token
        self._size = 0
        self._add(request.open_tokens, request.open_parents)
        _, known = self._walk(tokens)
        # Half of the budget is kept for the model.
        self._tokens = tokens[: known + request.budget // 2]
        self.missing = len(self._tokens) - known

    def join(self, result: DraftResult) -> DraftResult:
        """Return the model's result, with this branch once the model has drafted all that it may."""
        request = self._request
        positions = (position for position, _, _ in token_positions(request, result))
        depth = max(positions, default=0) + 1 - request.committed
        if not result.done and depth < request.depth and len(result.tokens) < request.budget - self.missing:
            return result
        parents = list(result.parents or self._chain_parents(result))
        tokens = list(result.tokens)
        self._add(result.tokens, parents)
        node, known = self._walk(self._tokens)
        for token in self._tokens[known:]:
            if len(tokens) >= request.budget or len(self._children.get(node, {})) >= request.branches:
                break
            tokens.append(token)
            parents.append(node)
            self._add((token,), (node,))
            node = self._size - 1
        return DraftResult(tuple(tokens), (), True, tuple(parents))

    def _add(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        for token, parent in zip(tokens, parents, strict=True):
            self._children.setdefault(parent, {})[token] = self._size
            self._size += 1

    def _walk(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the last node of the tree along a path, and its depth."""
        node = ROOT
        for known, token in enumerate(tokens):
            child = self._children.get(node, {}).get(token)
            if child is None:
                return node, known
            node = child
        return node, len(tokens)

    def _chain_parents(self, result: DraftResult) -> list[int]:
        """Return the parents of a chain that continues the longest open chain."""
        tip, _ = self._walk(self._request.tokens[self._request.committed :])
        first = len(self._request.open_tokens)
        return [tip, *range(first, first + len(result.tokens) - 1)][: len(result.tokens)]
