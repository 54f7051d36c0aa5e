"""From logits to the distribution that a request asked for: the one definition, used by both sides.

The order is fixed: logit bias, penalties, grammar, temperature, top-k, top-p,
min-p.
A row's bits depend on that row alone: not on the rows beside it, not on how
many there are, and not on how wide a processor's vectors are. Elementwise
operations are so by themselves; a sum is only if its order is fixed, so no
reduction of torch's that rounds is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import WHOLE, Distribution, TokenLogprobs

_NUCLEUS_LOOKS = (128, 1024)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ids that survive the cuts, with their probabilities, per row.

    `ids` is [rows, kept], or [vocab] when every id survives; `probs` is
    [rows, kept] in double precision, 0 where a cut removed an id.
    """

    ids: torch.Tensor
    probs: torch.Tensor

    def dense(self, vocab_size: int) -> torch.Tensor:
        """The same as one probability per id.  # [rows, vocab]"""
        if self.ids.dim() == 1:
            return self.probs
        return torch.zeros((self.probs.shape[0], vocab_size), dtype=torch.float64, device=self.probs.device).scatter_(
            1, self.ids, self.probs
        )


class History:
    """What has been said so far in one session, as the penalties need it.

    Repetition looks at prompt and output, presence and frequency at output.
    """

    def __init__(self, tokens: Sequence[int], prompt_length: int, vocab_size: int, device: torch.device) -> None:
        self._prompted = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._prompted[torch.tensor(tokens[:prompt_length], dtype=torch.int64, device=device)] = True
        self.append(tokens[prompt_length:])

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._counts[token] += 1

    def penalise(self, logits: torch.Tensor, params: SamplingParams, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Penalties for rows that each continue the history by a path of guessed tokens.  # [rows, vocab]"""
        counts = self._counts.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[row, token] += 1
        said = counts > 0
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(said | self._prompted, scaled, logits)
        logits = logits - params.frequency_penalty * counts
        return logits - params.presence_penalty * said.to(logits.dtype)


def adjust(
    logits: torch.Tensor, params: SamplingParams, history: History | None, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Bias and penalties: all that changes logits before the draw.  # [rows, vocab]"""
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(1, ids, bias.repeat(logits.shape[0], 1))
    if history is not None and params.penalised:
        logits = history.penalise(logits, params, paths)
    return logits


def restrict(logits: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Only these ids can be drawn; a row that allows none stays as it is, for nobody draws from it.  # [rows, vocab]"""
    refused = ~allowed & allowed.any(axis=-1, keepdims=True)
    return logits.masked_fill(torch.from_numpy(refused).to(logits.device), float("-inf"))


def candidates(logits: torch.Tensor, params: SamplingParams) -> Candidates:
    """Temperature and cuts on adjusted logits.  # [rows, vocab]"""
    vocab = logits.shape[-1]
    if 0 < params.top_k < vocab:
        values, ids = logits.topk(params.top_k, dim=-1)
        return _cut(ids, _softmax(values, params.temperature), params)
    probs = _softmax(logits, params.temperature)
    if params.top_p < 1.0:
        top, ids = _sorted_nucleus(probs, params.top_p)
        return _cut(ids, top, params)
    ids = torch.arange(vocab, device=logits.device)
    if params.min_p > 0.0:
        probs = probs * (probs >= params.min_p * probs.amax(dim=-1, keepdim=True))
        probs = probs / _sums(probs)
    return Candidates(ids, probs)


def _softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In double precision.  # [rows, ids]"""
    scaled = logits.to(torch.float64) / temperature
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    return weights.div_(_sums(weights))


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, by adding the second half onto the first until one number is left.  # [rows, 1]"""
    width = rows.shape[-1]
    while width > 1:
        half = width // 2
        folded = rows[:, : width - half].clone()
        folded[:, :half] += rows[:, width - half : width]
        rows, width = folded, width - half
    return rows


def _running(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row before each of its entries: one by one, so zeros at the end change nothing.  # [rows, ids]"""
    return torch.nn.functional.pad(rows.cumsum(dim=-1)[:, :-1], (1, 0))


def _sorted_nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Enough ids for the nucleus, likeliest first, equals by id: a row comes out alike whatever its neighbours need."""
    for look in _NUCLEUS_LOOKS:
        # The nucleus is mostly among the first hundred and nearly always among the first thousand: sorting all ids is
        # for the rest.
        if look >= probs.shape[-1]:
            break
        top, ids = probs.topk(look, dim=-1)
        ids, order = ids.sort(dim=-1)
        top, order = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
        # The last ones may have equals that were not taken: they must not be needed.
        safe = (top * (top > top[:, -1:])).cumsum(dim=-1)[:, -1] >= top_p
        if bool(safe.all()):
            return top, ids.gather(1, order)
    return probs.sort(dim=-1, descending=True, stable=True)


def _cut(ids: torch.Tensor, probs: torch.Tensor, params: SamplingParams) -> Candidates:
    """Top-p and min-p on rows sorted by falling probability."""
    if params.top_p < 1.0:
        probs = probs * (_running(probs) < params.top_p)
    if params.min_p > 0.0:
        probs = probs * (probs >= params.min_p * probs[:, :1])
    return Candidates(ids, probs / probs.cumsum(dim=-1)[:, -1:])


def quantise(probs: torch.Tensor, ids: torch.Tensor, keep: int) -> Distribution:
    """The `keep` likeliest ids of one row in parts of 65536: what a drafter draws from and sends.

    Quantising first and drawing afterwards keeps rejection exact.
    """
    top = probs.topk(min(keep, probs.shape[-1]))
    shares = top.values / top.values.sum() * WHOLE
    weights = shares.floor().to(torch.int64)
    weights[0] += WHOLE - int(weights.sum())
    kept = weights > 0
    chosen = ids[top.indices][kept]
    order = chosen.argsort()
    return Distribution(tuple(chosen[order].tolist()), tuple(weights[kept][order].tolist()))


def logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Natural log probabilities of the chosen tokens and the `top` likeliest, from unadjusted logits."""
    logs = torch.log_softmax(logits.to(torch.float64), dim=-1)
    best = logs.topk(top, dim=-1) if top else None
    return [
        TokenLogprobs(
            logprob=float(logs[row, token]),
            top_ids=tuple(best.indices[row].tolist()) if best else (),
            top_logprobs=tuple(best.values[row].tolist()) if best else (),
        )
        for row, token in enumerate(tokens)
    ]
