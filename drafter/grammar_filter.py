"""Guesses that a grammar would not let through, taken out of a draft.

For drafters that do not draw: what a draw has brought must not be withheld.
"""

from __future__ import annotations

from drafter.interface import DraftRequest, DraftResult
from drafter.tree_builder import ROOT


def lawful(ask: DraftRequest, draft: DraftResult) -> DraftResult:
    """A draft as far as its session's grammar goes with it."""
    if ask.rails is None or not draft.tokens:
        return draft
    return _tree(ask, draft) if draft.parents else _chain(ask, draft)


def fitting(ask: DraftRequest, tokens: tuple[int, ...]) -> int:
    """How many tokens of a chain that goes on where the ask ends."""
    if ask.rails is None:
        return len(tokens)
    open_ = ask.tokens[ask.committed :]
    return max(0, ask.rails.fitting(ask.tokens, ask.committed, [*open_, *tokens]) - len(open_))


def _chain(ask: DraftRequest, draft: DraftResult) -> DraftResult:
    length = fitting(ask, draft.tokens)
    if length == len(draft.tokens):
        return draft
    return DraftResult(draft.tokens[:length], draft.draft_probs[:length], done=True)


def _tree(ask: DraftRequest, draft: DraftResult) -> DraftResult:
    assert ask.rails is not None
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (token, parent) in enumerate(zip(ask.open_tokens, ask.open_parents, strict=True)):
        paths[node] = [*paths[parent], token]
    first = len(ask.open_tokens)
    numbers = {node: node for node in paths}  # what is kept, and by which number
    tokens: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=first):
        if parent not in numbers:
            continue
        path = [*paths[parent], token]
        if ask.rails.fitting(ask.tokens, ask.committed, path) == len(path):
            paths[node] = path
            numbers[node] = first + len(tokens)
            tokens.append(token)
            parents.append(numbers[parent])
    return DraftResult(tuple(tokens), (), draft.done, tuple(parents))
