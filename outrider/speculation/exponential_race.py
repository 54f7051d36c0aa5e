"""The draw that drafter and target share: with one seed and position, similar distributions usually agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation import acceptance, noise, sampling, triton_race
from outrider.speculation.sampling import Cuts

_CANDIDATES = 64  # likeliest ids that guesses are taken from: the others almost never win

Choice = tuple[int, float]  # a token, and the logarithm of its probability to win


def shared_draw(logits: torch.Tensor, params: SamplingParams, positions: Sequence[int]) -> list[int]:
    """Return the token drawn from each row of a request's adjusted logits at its absolute position.  # [rows, vocab]"""
    drawn = acceptance.likeliest(logits) if params.greedy else coupled_draws(logits, [params] * len(logits), positions)
    return [int(token) for token in drawn.tolist()]


def coupled_draws(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """Return the token drawn from each row with the row's own parameters, which need the same cuts.  # [rows]"""
    keys = [shared_key(each, position) for each, position in zip(params, positions, strict=True)]
    cuts = Cuts.of(params, logits.device)
    if not any(cuts.kind) and (logits.is_cuda or logits.shape[-1] > noise.MANY_IDS):
        return _uncut_draws(logits, noise.signed(keys), cuts.temperature[:, 0])
    kept = sampling.cut(logits, cuts)
    columns = noise.exponential_race(keys, kept.ids, kept.probs)
    return columns if kept.ids.dim() == 1 else kept.ids.gather(1, columns[:, None])[:, 0]


def shared_key(params: SamplingParams, position: int) -> int:
    """Return the key of the noise that drafter and target share."""
    assert params.seed is not None
    return noise.key(params.seed, noise.Use.COUPLED, position)


def _uncut_draws(logits: torch.Tensor, states: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Draw from the softmax over the whole vocabulary without computing it: a race needs no normalised weights."""
    if logits.is_cuda:
        return triton_race.race(logits, noise.to_device(states, logits.device), temperatures)
    highest = logits.amax(dim=-1).to(torch.float64) / temperatures

    def weigh(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (values.to(torch.float64) / temperatures[rows] - highest[rows]).exp_()

    return noise.pruned_race(states, logits, weigh)


def shared_choices(
    logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], count: int, ids: torch.Tensor | None = None
) -> list[list[Choice]]:
    """Return the shared draw's winner of each row and its runners-up, as guesses.  # logits: [rows, columns]

    A model that draws with the same noise is likely to draw one of them. The draw is the argmax of log-probabilities
    plus Gumbel noise, which is −log of the race's exponentials. The softmax of these sums (of the logits when greedy)
    estimates how likely each token is to win for a similar model. Only the likeliest ids are considered. `ids`: those
    of the columns, ascending; None: all.
    """
    values, columns = _likeliest(logits)
    ids = columns if ids is None else ids[columns]
    if params.greedy:
        sums = values.to(torch.float64)
    else:
        kept = sampling.candidates(values, params)
        ids = ids.gather(1, kept.ids.expand(len(values), -1))
        keys = [shared_key(params, position) for position in positions]
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
