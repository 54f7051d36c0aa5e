"""The lossless acceptance rules, without I/O or global randomness.

Every random decision comes from a `RandomSource`: counter-based noise in
production, an enumerator of all branches in the proofs. Row 0 of the target's
logits follows the last committed token, row i the i-th guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.protocol.speculation import WHOLE, Distribution, TokenKind
from outrider.speculation import noise


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for a block: the accepted rows, from the root down, and the target's own token after them."""

    path: tuple[int, ...]
    final: int
    kind: TokenKind


class RandomSource(Protocol):
    """The random decisions of a rule. Each method is called at most once per (position, block)."""

    def accept(self, probability: float, position: int, block: int) -> bool:
        """Return True with the given probability."""
        ...

    def draw(self, weights: torch.Tensor, position: int) -> int:
        """Return an id, with P(id) = weights[id] / Σ weights.  # [vocab]"""
        ...


class SeededNoise:
    """Random decisions as a function of the request's seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def accept(self, probability: float, position: int, block: int) -> bool:
        return noise.uniform(self._seed, noise.Use.ACCEPT, position, block) < probability

    def draw(self, weights: torch.Tensor, position: int) -> int:
        ids = torch.arange(weights.shape[-1], device=weights.device)
        return int(noise.exponential_race([noise.key(self._seed, noise.Use.FINAL, position)], ids, weights[None])[0])


def walk(tokens: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> Outcome:
    """Follow the target's own draws through the tree as long as they were guessed (greedy and coupled modes).

    `parents` is the guesses' TreeShape. drawn[0] is the target's token after
    the committed text, drawn[i + 1] its token after guess i.
    """
    children: dict[tuple[int, int], int] = {}
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        children.setdefault((parent + 1, token), row)
    guessed_after = {parent + 1 for parent in parents}
    path: list[int] = []
    row = 0
    while (child := children.get((row, drawn[row]))) is not None:
        path.append(child)
        row = child
    return Outcome(tuple(path), drawn[row], _kind(bool(tokens), row in guessed_after))


def rejection(
    tokens: Sequence[int], target: torch.Tensor, draft: Sequence[Distribution], position: int, chance: RandomSource
) -> Outcome:
    """Verify token by token (Leviathan et al. 2023, algorithm 1): accept a guess with probability min(1, target/draft).

    `target` is [len(tokens) + 1, vocab]; guess i is for position + i.
    """
    for i, (token, drawn_from) in enumerate(zip(tokens, draft, strict=True)):
        ratio = float(target[i, token]) / draft_prob(drawn_from, token)
        if not chance.accept(min(1.0, ratio), position + i, position):
            final = chance.draw(residual(target[i], drawn_from, 1.0), position + i)
            return Outcome(tuple(range(1, i + 1)), final, TokenKind.RECOVERED)
    n = len(tokens)
    return Outcome(tuple(range(1, n + 1)), chance.draw(target[n], position + n), _kind(n > 0, False))


def block(
    tokens: Sequence[int], target: torch.Tensor, draft: Sequence[Distribution], position: int, chance: RandomSource
) -> Outcome:
    """Verify a whole block at once (Sun et al., arXiv 2403.10444, algorithm 2): never accepts less than `rejection`.

    reach[i] is the paper's p_i, the joint chance that the first i guesses hold.
    """
    n = len(tokens)
    reach = [1.0]
    for i, (token, drawn_from) in enumerate(zip(tokens, draft, strict=True)):
        reach.append(min(1.0, reach[i] * float(target[i, token]) / draft_prob(drawn_from, token)))
    accepted = 0
    for i in range(1, n + 1):
        if i == n:
            probability = reach[n]
        else:
            rest = float(residual(target[i], draft[i], reach[i]).sum())
            either = rest + (1.0 - reach[i])
            probability = rest / either if either > 0.0 else 1.0
        if chance.accept(probability, position + i - 1, position):
            accepted = i
    path = tuple(range(1, accepted + 1))
    if accepted == n:
        return Outcome(path, chance.draw(target[n], position + n), _kind(n > 0, False))
    weights = residual(target[accepted], draft[accepted], reach[accepted])
    return Outcome(path, chance.draw(weights, position + accepted), TokenKind.RECOVERED)


def residual(target: torch.Tensor, draft: Distribution, scale: float) -> torch.Tensor:
    """Return the positive part of scale · target − draft, not normalised.  # [vocab]"""
    left = target * scale
    ids = torch.tensor(draft.ids, dtype=torch.int64, device=target.device)
    share = torch.tensor(draft.weights, dtype=torch.float64, device=target.device) / WHOLE
    left[ids] -= share
    left.clamp_(min=0.0)
    return left


def draft_prob(draft: Distribution, token: int) -> float:
    """Return the draft probability of a drawn token; never 0, because incoming messages are checked."""
    return draft.weights[draft.ids.index(token)] / WHOLE


def _kind(guessed: bool, guess_failed: bool) -> TokenKind:
    if not guessed:
        return TokenKind.PLAIN
    return TokenKind.RECOVERED if guess_failed else TokenKind.BONUS
