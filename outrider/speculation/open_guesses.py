"""The open guesses of one drafter: those after the committed tokens, with what of them was sent to the verifier."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.speculation import MAX_GAMMA, ROOT, Guess


class OpenGuesses:
    """One tree at the committed position. Commits prune it; a drafter extends it, also from an earlier position."""

    def __init__(self, position: int) -> None:
        self.guess = Guess(position, 0, 0, ())
        self._ids: list[int] = []  # by node; 0: not sent yet
        self._next_id = 1

    def extend(self, guess: Guess, committed: Sequence[int]) -> None:
        """Replace the tree by one that extends it as it was at the guess's position; `committed` came since."""
        self.guess, _ = _after(guess, committed)
        self._ids += [0] * (len(self.guess.tokens) - len(self._ids))

    def commit(self, tokens: Sequence[int]) -> list[tuple[int, int | None]]:
        """Keep what agrees with committed tokens; return, to the first miss, how many guesses each had and its rank."""
        outcomes: list[tuple[int, int | None]] = []
        node = ROOT
        for token in tokens:
            siblings = self.guess.children.get(node, {})
            outcomes.append((len(siblings), list(siblings).index(token) if token in siblings else None))
            if token not in siblings:
                break
            node = siblings[token]
        self.guess, kept = _after(self.guess, tokens)
        self._ids = [self._ids[node] for node in kept]
        return outcomes

    def take_unsent(self, draft_us: int) -> Guess | None:
        """Return one subtree that was not sent yet, so that a verifier's step sees all of it or nothing."""
        unsent = [node for node, node_id in enumerate(self._ids) if not node_id]
        if not unsent:
            return None
        shape = self.guess.shape
        top = shape.parents[unsent[0]]
        nodes = shape.below(top, unsent)[:MAX_GAMMA]
        guess = self.guess.part(top, nodes, self._next_id, self._ids[top] if top >= 0 else 0, draft_us)
        for node in nodes:
            self._ids[node] = self._next_id
            self._next_id += 1
        return guess


def _after(guess: Guess, tokens: Sequence[int]) -> tuple[Guess, Sequence[int]]:
    """Return the part of a guess that follows these tokens, and its nodes."""
    every = range(len(guess.tokens))
    if not tokens:
        return guess, every
    top, known = guess.walk(tokens)
    if known < len(tokens):
        return Guess(guess.position + len(tokens), 0, 0, ()), ()
    nodes = guess.shape.below(top, every)
    return guess.part(top, nodes), nodes
