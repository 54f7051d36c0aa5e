"""The draw that drafter and target share: greedy and coupled sampling.

Both call the same function with the same seed and position. Similar
distributions then usually give the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation import noise, sampling

_CANDIDATES = 64  # likeliest ids that guesses are taken from: the others almost never win

Choice = tuple[int, float]  # a token, and the logarithm of its probability to win


def shared_draw(logits: torch.Tensor, params: SamplingParams, positions: Sequence[int]) -> list[int]:
    """Return the token drawn from each row of adjusted logits at its absolute position.  # [rows, vocab]"""
    if params.greedy:
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    assert params.seed is not None
    kept = sampling.candidates(logits, params)
    keys = [noise.key(params.seed, noise.Use.COUPLED, position) for position in positions]
    columns = noise.exponential_race(keys, kept.ids, kept.probs)
    if kept.ids.dim() == 1:
        return [int(column) for column in columns.tolist()]
    return [int(token) for token in kept.ids.gather(1, columns[:, None])[:, 0].tolist()]


def shared_choices(
    logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], count: int
) -> list[list[Choice]]:
    """Return the shared draw's winner of each row and its runners-up, as guesses.

    A model that draws with the same noise is likely to draw one of them. The
    draw is the argmax of log-probabilities plus Gumbel noise, which is −log of
    the race's exponentials. The softmax of these sums (of the logits when
    greedy) estimates how likely each token is to win for a similar model. Only
    the likeliest ids are considered.
    """
    values, ids = _likeliest(logits)
    if params.greedy:
        sums = values.to(torch.float64)
    else:
        assert params.seed is not None
        kept = sampling.candidates(values, params)
        columns = kept.ids.expand(len(values), -1)
        ids = ids.gather(1, columns)
        keys = [noise.key(params.seed, noise.Use.COUPLED, position) for position in positions]
        sums = -noise.arrival_times(keys, ids, kept.probs).log()
    best = torch.log_softmax(sums, dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, tokens = best.values[:, :count], ids.gather(1, best.indices[:, :count])
    return [
        [(token, share) for token, share in zip(row, logs, strict=True) if share > float("-inf")]
        for row, logs in zip(tokens.tolist(), shares.tolist(), strict=True)
    ]


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest ids, ascending: of equal values the lowest id wins, as everywhere.  # [rows, kept] each"""
    values, ids = logits.topk(min(_CANDIDATES, logits.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    return values.gather(1, order), ids
