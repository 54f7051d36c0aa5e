"""The lossless acceptance rules, without I/O or global randomness.

Every random decision comes from a `RandomSource`: counter-based noise in production, an enumerator of all branches in
the proofs. Row 0 of the target's logits follows the last committed token, row i the i-th guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from outrider.protocol.sampling_params import Verification
from outrider.protocol.speculation import ROOT, WHOLE, Distribution, Guess, TokenKind
from outrider.speculation import noise
from outrider.speculation.noise import to_device
from outrider.speculation.sampling import sums


class Outcome(NamedTuple):
    """The result for a block: the accepted rows, from the root down, and the target's own token after them."""

    path: tuple[int, ...]
    final: int
    kind: TokenKind


class RandomSource(Protocol):
    """The random decisions of a rule. Each method is called at most once per (position, block)."""

    def accept(self, probability: float, position: int, block: int) -> bool:
        """Return True with the given probability."""

    def draw(self, weights: torch.Tensor, position: int) -> int:
        """Return an id, with P(id) = weights[id] / Σ weights.  # [vocab]"""


class SeededNoise:
    """Random decisions as a function of the request's seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def accept(self, probability: float, position: int, block: int) -> bool:
        return noise.uniform(self._seed, noise.Use.ACCEPT, position, block) < probability

    def draw(self, weights: torch.Tensor, position: int) -> int:
        ids = torch.arange(weights.shape[-1], device=weights.device)
        return int(noise.exponential_race([self.final_key(position)], ids, weights[None])[0])

    def final_key(self, position: int) -> int:
        return noise.key(self._seed, noise.Use.FINAL, position)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row, the first of equal ones. On a CPU NumPy is 15 times as fast as torch."""
    return torch.as_tensor((logits.float().numpy() if logits.device.type == "cpu" else logits).argmax(-1))


def walk(block: Guess, drawn: Sequence[int]) -> Outcome:
    """Follow the target's own draws through the tree as long as they were guessed (greedy and coupled modes).

    drawn[0] is the target's token after the committed text, drawn[i + 1] after guess i.
    """
    path: list[int] = []
    node = ROOT
    while (child := block.children.get(node, {}).get(drawn[node + 1])) is not None:
        path.append(child + 1)
        node = child
    return Outcome(tuple(path), drawn[node + 1], _kind(bool(block.tokens), node in block.children))


def verify_drawn(
    guesses: Sequence[Guess], modes: Sequence[Verification], chances: Sequence[RandomSource], target: torch.Tensor
) -> list[Outcome]:
    """Verify chains of several sessions under `rejection` or `block`; `target` holds their rows in order.

    `_count_one_by_one` and `_count_in_block` decide how many guesses are accepted. A chain has no branches.
    Numbers of the vocabulary's size are computed for all sessions together; each then decides with its own chance.
    """
    starts = list(accumulate((len(guess.tokens) + 1 for guess in guesses), initial=0))[:-1]
    ratios = _ratios(guesses, starts, target)
    reaches = [_reach(*each) for each in zip(ratios, modes, strict=True)]
    inner = [
        _residual(guess, start, reach, i)
        for guess, start, reach, mode in zip(guesses, starts, reaches, modes, strict=True)
        for i in range(1, len(guess.tokens))
        if mode is Verification.BLOCK
    ]
    rests: Iterator[float] = iter(sums(residuals(target, inner))[:, 0].tolist() if inner else ())
    counts = [
        _count_in_block(guess, reach, rests, chance)
        if mode is Verification.BLOCK
        else _count_one_by_one(guess, own, chance)
        for guess, mode, reach, own, chance in zip(guesses, modes, reaches, ratios, chances, strict=True)
    ]
    last = [_residual(*each) for each in zip(guesses, starts, reaches, counts, strict=True)]
    positions = [guess.position + count for guess, count in zip(guesses, counts, strict=True)]
    finals = _draw_finals(chances, residuals(target, last), positions)
    return [
        Outcome(tuple(range(1, count + 1)), final, _kind(bool(guess.tokens), count < len(guess.tokens)))
        for guess, count, final in zip(guesses, counts, finals, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Residual:
    """The positive part of scale · target − draft, of one row of the target; the row itself without a draft."""

    row: int
    draft: Distribution | None = None
    scale: float = 1.0


def residuals(target: torch.Tensor, wanted: Sequence[Residual]) -> torch.Tensor:
    """Return residuals, not normalised.  # [wanted, vocab]"""
    rows = to_device(torch.tensor([each.row for each in wanted]), target.device)
    scales = to_device(torch.tensor([each.scale for each in wanted], dtype=torch.float64), target.device)
    left = target[rows] * scales[:, None]
    drafts = [(index, each.draft) for index, each in enumerate(wanted) if each.draft is not None]
    if drafts:
        places = torch.tensor([(index, token) for index, draft in drafts for token in draft.ids])
        weights = torch.tensor([weight for _, draft in drafts for weight in draft.weights], dtype=torch.float64)
        row, token = to_device(places.T.contiguous(), target.device)
        left.index_put_((row, token), to_device(weights / -WHOLE, target.device), accumulate=True)
    return left.clamp_(min=0.0)


def _ratios(guesses: Sequence[Guess], starts: Sequence[int], target: torch.Tensor) -> list[list[float]]:
    """Return target / draft of each guessed token; no draft is 0, because incoming messages are checked."""
    places = [(start + i, token) for start, g in zip(starts, guesses, strict=True) for i, token in enumerate(g.tokens)]
    row, token = to_device(torch.tensor(places, dtype=torch.int64).view(-1, 2).T.contiguous(), target.device)
    likely = iter(target[row, token].tolist())
    return [
        [next(likely) / (q.weights[q.ids.index(id_)] / WHOLE) for id_, q in zip(g.tokens, g.draft_probs, strict=True)]
        for g in guesses
    ]


def _reach(ratios: Sequence[float], mode: Verification) -> list[float]:
    """Return p_i of block verification, the joint chance that the first i guesses hold; for rejection all are 1."""
    if mode is not Verification.BLOCK:
        return [1.0] * (len(ratios) + 1)
    return list(accumulate(ratios, lambda reach, ratio: min(1.0, reach * ratio), initial=1.0))


def _residual(guess: Guess, start: int, reach: Sequence[float], count: int) -> Residual:
    """Return the residual after the first `count` guesses of a chain whose rows begin at `start`."""
    if count == len(guess.tokens):
        return Residual(start + count)
    return Residual(start + count, guess.draft_probs[count], reach[count])


def _count_one_by_one(guess: Guess, ratios: Sequence[float], chance: RandomSource) -> int:
    """Accept guesses with probability min(1, target/draft) up to the first that fails (Leviathan et al. 2023)."""
    for i, ratio in enumerate(ratios):
        if not chance.accept(min(1.0, ratio), guess.position + i, guess.position):
            return i
    return len(ratios)


def _count_in_block(guess: Guess, reach: Sequence[float], rests: Iterator[float], chance: RandomSource) -> int:
    """Return the longest prefix that is accepted; each prefix has a decision of its own.

    Sun et al., arXiv 2403.10444, algorithm 2. It never accepts less than `_count_one_by_one`.
    """
    accepted, n = 0, len(guess.tokens)
    for i in range(1, n + 1):
        rest = reach[n] if i == n else next(rests)
        either = 1.0 if i == n else rest + (1.0 - reach[i])
        probability = rest / either if either > 0.0 else 1.0
        if chance.accept(probability, guess.position + i - 1, guess.position):
            accepted = i
    return accepted


def _draw_finals(chances: Sequence[RandomSource], weights: torch.Tensor, positions: Sequence[int]) -> list[int]:
    """Draw each session's last token, in one race where all noise is seeded."""
    keys = [chance.final_key(at) for chance, at in zip(chances, positions, strict=True) if type(chance) is SeededNoise]
    if len(keys) < len(chances):
        return [chance.draw(*each) for chance, *each in zip(chances, weights, positions, strict=True)]
    ids = torch.arange(weights.shape[-1], device=weights.device)
    return [int(token) for token in noise.exponential_race(keys, ids, weights).tolist()]


def _kind(guessed: bool, guess_failed: bool) -> TokenKind:
    return TokenKind.PLAIN if not guessed else TokenKind.RECOVERED if guess_failed else TokenKind.BONUS
