"""A proposed chain as a branch of the tree that a model drafts."""

from __future__ import annotations

from drafter.interface import DraftRequest
from outrider.protocol.speculation import Guess


def join(request: DraftRequest, guess: Guess, branch: tuple[int, ...], missing: int) -> Guess:
    """Return the model's guess, with the branch once the model has drafted all that it may."""
    depth = max(guess.shape.depths[len(request.open_guess.tokens) :], default=0)
    if not guess.done and depth < request.depth and len(request.new_tokens(guess)) < request.budget - missing:
        return guess
    tokens, parents = list(guess.tokens), list(guess.shape.parents)
    most = len(request.open_guess.tokens) + request.budget
    node, known = guess.walk(branch)
    for token in branch[known:]:
        if len(tokens) >= most or parents.count(node) >= request.branches:
            break
        tokens.append(token)
        parents.append(node)
        node = len(tokens) - 1
    return Guess(guess.position, 0, 0, tuple(tokens), parents=tuple(parents), done=True)
