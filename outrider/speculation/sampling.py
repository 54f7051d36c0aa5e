"""The distribution that a request specifies, from logits: one definition for drafters and verifiers.

The order is fixed: logit bias, penalties, grammar, temperature, top-k, top-p,
min-p.
A row's bits depend on that row alone: not on other rows, their number, or the
width of a processor's vectors. Elementwise operations have this property. A
sum has it only if its order is fixed, so no torch reduction that rounds is
used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import WHOLE, Distribution, TokenLogprobs

_NUCLEUS_SIZES = (128, 1024)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ids after top-k, top-p and min-p, with their probabilities, per row.

    `ids` is [rows, kept], or [vocab] when every id is kept; `probs` is
    [rows, kept] in double precision, 0 for a removed id.
    """

    ids: torch.Tensor
    probs: torch.Tensor

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Return the same as one probability per id.  # [rows, vocab]"""
        if self.ids.dim() == 1:
            return self.probs
        return torch.zeros((self.probs.shape[0], vocab_size), dtype=torch.float64, device=self.probs.device).scatter_(
            1, self.ids, self.probs
        )


class History:
    """The counts of one session's tokens, for the penalties.

    Repetition counts prompt and output, presence and frequency the output.
    """

    def __init__(self, tokens: Sequence[int], prompt_length: int, vocab_size: int, device: torch.device) -> None:
        self._prompted = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._prompted[torch.tensor(tokens[:prompt_length], dtype=torch.int64, device=device)] = True
        self.append(tokens[prompt_length:])

    def append(self, tokens: Sequence[int]) -> None:
        """Count output tokens."""
        for token in tokens:
            self._counts[token] += 1

    def penalise(self, logits: torch.Tensor, params: SamplingParams, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return penalised logits for rows that each continue the history by a path of guesses.  # [rows, vocab]"""
        counts = self._counts.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[row, token] += 1
        in_output = counts > 0
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(in_output | self._prompted, scaled, logits)
        logits = logits - params.frequency_penalty * counts
        return logits - params.presence_penalty * in_output.to(logits.dtype)


def adjust(
    logits: torch.Tensor, params: SamplingParams, history: History | None, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return logits with bias and penalties.  # [rows, vocab]"""
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(1, ids, bias.repeat(logits.shape[0], 1))
    if history is not None and params.penalised:
        logits = history.penalise(logits, params, paths)
    return logits


def restrict(logits: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Return logits restricted to the allowed ids. A row that allows none is unused and unchanged.  # [rows, vocab]"""
    refused = ~allowed & allowed.any(axis=-1, keepdims=True)
    return logits.masked_fill(torch.from_numpy(refused).to(logits.device), float("-inf"))


def candidates(logits: torch.Tensor, params: SamplingParams) -> Candidates:
    """Apply temperature, top-k, top-p and min-p to adjusted logits.  # [rows, vocab]"""
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
    """Return the softmax in double precision.  # [rows, ids]"""
    scaled = logits.to(torch.float64) / temperature
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    return weights.div_(_sums(weights))


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, by adding the second half to the first until one number is left.  # [rows, 1]"""
    width = rows.shape[-1]
    while width > 1:
        half = width // 2
        folded = rows[:, : width - half].clone()
        folded[:, :half] += rows[:, width - half : width]
        rows, width = folded, width - half
    return rows


def _running(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum before each entry of a row, in order: zeros at the end change nothing.  # [rows, ids]"""
    return torch.nn.functional.pad(rows.cumsum(dim=-1)[:, :-1], (1, 0))


def _sorted_nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return enough ids for the nucleus, likeliest first, equals by id. A row does not depend on the others."""
    for count in _NUCLEUS_SIZES:
        # The nucleus mostly lies in the first hundred ids and nearly always in the first thousand.
        if count >= probs.shape[-1]:
            break
        top, ids = probs.topk(count, dim=-1)
        ids, order = ids.sort(dim=-1)
        top, order = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
        # Ids equal to the last ones may be missing, so the last ones must not be needed.
        safe = (top * (top > top[:, -1:])).cumsum(dim=-1)[:, -1] >= top_p
        if bool(safe.all()):
            return top, ids.gather(1, order)
    return probs.sort(dim=-1, descending=True, stable=True)


def _cut(ids: torch.Tensor, probs: torch.Tensor, params: SamplingParams) -> Candidates:
    """Apply top-p and min-p to rows sorted by falling probability."""
    if params.top_p < 1.0:
        probs = probs * (_running(probs) < params.top_p)
    if params.min_p > 0.0:
        probs = probs * (probs >= params.min_p * probs[:, :1])
    return Candidates(ids, probs / probs.cumsum(dim=-1)[:, -1:])


def quantise(probs: torch.Tensor, ids: torch.Tensor, keep: int) -> Distribution:
    """Return the `keep` likeliest ids of one row in parts of 65536: a drafter draws from it and sends it.

    Rejection stays exact because the draw comes after the quantisation.
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
    """Return natural log probabilities of the chosen tokens and of the `top` likeliest, from unadjusted logits."""
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
