"""Removal of guesses that the session's grammar forbids.

Only for deterministic drafters: withholding a sampled token would bias the
text under rejection and block verification.
"""

from __future__ import annotations

from drafter.interface import DraftRequest, DraftResult
from outrider.protocol.speculation import ROOT, TreeShape


def filter_by_grammar(request: DraftRequest, result: DraftResult) -> DraftResult:
    """Return the part of a draft that the session's grammar allows."""
    if request.grammar_cursor is None or not result.tokens:
        return result
    return _filter_tree(request, result) if result.parents else _filter_chain(request, result)


def allowed_length(request: DraftRequest, tokens: tuple[int, ...]) -> int:
    """Return how many tokens of a chain after `request.tokens` the grammar allows."""
    if request.grammar_cursor is None:
        return len(tokens)
    open_path = request.tokens[request.committed :]
    path = [*open_path, *tokens]
    return max(0, request.grammar_cursor.allowed_length(request.tokens, request.committed, path) - len(open_path))


def _filter_chain(request: DraftRequest, result: DraftResult) -> DraftResult:
    length = allowed_length(request, result.tokens)
    if length == len(result.tokens):
        return result
    return DraftResult(result.tokens[:length], result.draft_probs[:length], done=True)


def _filter_tree(request: DraftRequest, result: DraftResult) -> DraftResult:
    cursor = request.grammar_cursor
    assert cursor is not None
    open_paths = TreeShape(request.open_parents).token_paths(request.open_tokens)
    paths: dict[int, tuple[int, ...]] = {ROOT: (), **dict(enumerate(open_paths))}
    first = len(request.open_tokens)
    new_index = {node: node for node in paths}  # of the nodes that are kept
    tokens: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(zip(result.tokens, result.parents, strict=True), start=first):
        if parent not in new_index:
            continue
        path = (*paths[parent], token)
        if cursor.allowed_length(request.tokens, request.committed, path) == len(path):
            paths[node] = path
            new_index[node] = first + len(tokens)
            tokens.append(token)
            parents.append(new_index[parent])
    return DraftResult(tuple(tokens), (), result.done, tuple(parents))
