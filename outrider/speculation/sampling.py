"""The distribution that a request specifies, from logits: one definition for drafters and verifiers.

The order is fixed: logit bias, penalties, grammar, temperature, top-k, top-p, min-p. A row's bits depend on that row
alone: not on other rows, their number, or the width of a processor's vectors. Elementwise operations have this
property. A sum has it only if its order is fixed, so no torch reduction that rounds is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import WHOLE, Distribution, TokenLogprobs
from outrider.speculation.noise import to_device

_NUCLEUS_SIZES = (128, 1024)
_RECENT_TOKENS = 64  # of a session's output: counted on the device together
_LOWEST_LOGPROB = -9999.0  # OpenAI's, in place of −∞, which JSON lacks, and of NaN


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ids after top-k, top-p and min-p, with their probabilities, per row.

    `ids`: [rows, kept], or [vocab] if all are kept. `probs`: [rows, kept] in doubles, 0 for a removed or repeated id.
    """

    ids: torch.Tensor
    probs: torch.Tensor

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Return the same as one probability per id.  # [rows, vocab]"""
        if self.ids.dim() == 1:
            return self.probs
        return self.probs.new_zeros(len(self.probs), vocab_size).scatter_add_(1, self.ids, self.probs)


class History:
    """The counts of one session's tokens, for the penalties.

    Repetition counts prompt and output, presence and frequency the output. The
    device is used by `counts` alone, which the thread of the steps calls.
    """

    def __init__(self, tokens: Sequence[int], prompt_length: int, vocab_size: int, device: torch.device) -> None:
        self._prompt = list(tokens[:prompt_length])
        self._recent = list(tokens[prompt_length:])  # not counted on the device yet
        self._vocab_size = vocab_size
        self._device = device
        self._counts: torch.Tensor | None = None  # [prompt or output, vocab]

    def append(self, tokens: Sequence[int]) -> None:
        """Count output tokens."""
        self._recent += tokens

    def counts(self) -> tuple[torch.Tensor, Sequence[int]]:
        """Return counts of prompt and output on the device, and the output tokens that are not in them yet."""
        if self._counts is None:
            self._counts = torch.zeros(2, self._vocab_size, dtype=torch.float32, device=self._device)
            self._add(self._counts[0], self._prompt)
        if len(self._recent) > _RECENT_TOKENS:
            self._add(self._counts[1], self._recent)
            self._recent = []
        return self._counts, self._recent

    def _add(self, counts: torch.Tensor, tokens: Sequence[int]) -> None:
        ids = to_device(torch.tensor(tokens, dtype=torch.int64), self._device)
        counts.index_add_(0, ids, counts.new_ones(()).expand(len(tokens)))


@dataclass(frozen=True, slots=True)
class Continuations:
    """Rows of one session's logits: each follows its history and a path of guesses."""

    params: SamplingParams
    history: History | None  # None without penalties
    paths: Sequence[Sequence[int]]
    allowed: npt.NDArray[np.bool_] | None = None  # by the grammar, per row  # [rows, vocab]


def adjust(
    logits: torch.Tensor, params: SamplingParams, history: History | None, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return logits of one session with bias and penalties.  # [rows, vocab]"""
    return adjust_all(logits, [Continuations(params, history, paths)])


def adjust_all(logits: torch.Tensor, sessions: Sequence[Continuations]) -> torch.Tensor:
    """Return logits with bias, penalties and grammars, for sessions that need the same ones.  # [rows, vocab]"""
    biased, penalised = any(each.params.logit_bias for each in sessions), sessions[0].history is not None
    if biased or penalised:  # a logit of 100 and more would lose its differences in bfloat16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if biased:
        logits = _biased(logits, sessions)
    if penalised:
        logits = _penalised(logits, sessions)
    masks = [session.allowed for session in sessions if session.allowed is not None]
    return restrict(logits, np.concatenate(masks)) if masks else logits


def restrict(logits: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Return logits restricted to the allowed ids. A row that allows none is unused and unchanged.  # [rows, vocab]"""
    refused = ~allowed & allowed.any(axis=-1, keepdims=True)
    return logits.masked_fill(to_device(torch.from_numpy(refused), logits.device), float("-inf"))


def _biased(logits: torch.Tensor, sessions: Sequence[Continuations]) -> torch.Tensor:
    biases = [session.params.logit_bias for session in sessions for _ in session.paths]
    rows = torch.arange(len(biases)).repeat_interleave(torch.tensor([len(bias) for bias in biases]))
    row, token = to_device(torch.stack((rows, torch.tensor([*chain.from_iterable(biases)]))), logits.device)
    values = torch.tensor([*chain.from_iterable(bias.values() for bias in biases)], dtype=logits.dtype)
    return logits.index_put((row, token), logits[row, token] + to_device(values, logits.device))


def _penalised(logits: torch.Tensor, sessions: Sequence[Continuations]) -> torch.Tensor:
    prompts, outputs, added = [], [], []
    for session in sessions:
        assert session.history is not None
        counts, recent = session.history.counts()
        prompts.append(counts[0].expand(len(session.paths), -1))
        outputs.append(counts[1].expand(len(session.paths), -1))
        added += [(*recent, *path) for path in session.paths]
    places = torch.tensor([(row, token) for row, tokens in enumerate(added) for token in tokens], dtype=torch.int64)
    row, token = to_device(places.view(-1, 2).T.contiguous(), logits.device)
    said = torch.cat(outputs)
    said.index_put_((row, token), said.new_ones(()), accumulate=True)
    params = [session.params for session in sessions for _ in session.paths]
    numbers = [[each.repetition_penalty, each.frequency_penalty, each.presence_penalty] for each in params]
    columns = to_device(torch.tensor(numbers, dtype=logits.dtype).T.contiguous(), logits.device)
    repetition, frequency, presence = columns[:, :, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    repeated: torch.Tensor = torch.where((said > 0) | (torch.cat(prompts) > 0), scaled, logits)
    return repeated.sub(frequency * said).sub(presence * (said > 0).to(logits.dtype))


@dataclass(frozen=True, slots=True)
class Cuts:
    """Temperatures and cuts, per row. All rows have the same `kind`."""

    kind: CutKind
    temperature: torch.Tensor  # [rows, 1]
    top_p: torch.Tensor  # [rows, 1]
    min_p: torch.Tensor  # [rows, 1]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Cuts:
        numbers = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float64)
        temperature, top_p, min_p = to_device(numbers.T.contiguous(), device)[:, :, None]
        return cls(cut_kind(params[0]), temperature, top_p, min_p)


class CutKind(NamedTuple):
    """The cuts that a row needs."""

    top_k: int
    top_p: bool
    min_p: bool


def cut_kind(params: SamplingParams) -> CutKind:
    return CutKind(params.top_k, params.top_p < 1.0, params.min_p > 0.0)


def candidates(logits: torch.Tensor, params: SamplingParams) -> Candidates:
    """Apply temperature, top-k, top-p and min-p of one request to adjusted logits.  # [rows, vocab]"""
    return cut(logits, Cuts.of([params] * len(logits), logits.device))


def cut(logits: torch.Tensor, cuts: Cuts) -> Candidates:
    """Apply temperature, top-k, top-p and min-p to adjusted logits, each row's own.  # [rows, vocab]"""
    vocab = logits.shape[-1]
    if 0 < cuts.kind.top_k < vocab:
        values, ids = logits.topk(cuts.kind.top_k, dim=-1)
        return _cut_sorted(ids, _softmax(values, cuts.temperature), cuts)
    probs = _softmax(logits, cuts.temperature)
    if cuts.kind.top_p:
        top, ids = _sorted_nucleus(probs, cuts.top_p, _NUCLEUS_SIZES)
        return _cut_sorted(ids, top, cuts)
    ids = torch.arange(vocab, device=logits.device)
    if cuts.kind.min_p:
        probs = probs * (probs >= cuts.min_p * probs.amax(dim=-1, keepdim=True))
        probs = probs / sums(probs)
    return Candidates(ids, probs)


def _softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the softmax in double precision.  # [rows, ids]"""
    scaled = logits.to(torch.float64) / temperature
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    return weights.div_(sums(weights))


def sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, by adding the second half to the first until one number is left.  # [rows, 1]"""
    width = rows.shape[-1]
    while width > 1:
        half = width // 2
        folded = rows[:, : width - half].clone()
        folded[:, :half] += rows[:, width - half : width]
        rows, width = folded, width - half
    return rows


def _sorted_nucleus(probs: torch.Tensor, top_p: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return enough ids for the nucleus, likeliest first, equals by id. A row does not depend on the others."""
    # It mostly lies in the first hundred ids and nearly always in the first thousand. Only other rows are sorted.
    if not sizes or sizes[0] >= probs.shape[-1]:
        top, ids = probs.sort(dim=-1, descending=True, stable=True)
        needed = max(1 + int((top.cumsum(dim=-1) < top_p).sum(dim=-1).amax()), *_NUCLEUS_SIZES)
        return top[:, :needed], ids[:, :needed]
    top, ids = probs.topk(sizes[0], dim=-1)
    ids, order = ids.sort(dim=-1)
    top, order = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    # Ids equal to the last ones may be missing, so the last ones must not be needed.
    safe = (top * (top > top[:, -1:])).cumsum(dim=-1)[:, -1] >= top_p[:, 0]
    if bool(safe.all()):
        return top, ids
    rest = (~safe).nonzero()[:, 0]
    wider = _sorted_nucleus(probs[rest], top_p[rest], sizes[1:])
    top, ids = (torch.nn.functional.pad(each, (0, wider[0].shape[1] - sizes[0])) for each in (top, ids))
    top[rest], ids[rest] = wider
    return top, ids


def _cut_sorted(ids: torch.Tensor, probs: torch.Tensor, cuts: Cuts) -> Candidates:
    """Apply top-p and min-p to rows sorted by falling probability."""
    if cuts.kind.top_p:
        # In order: zeros at the end change nothing.
        before = torch.nn.functional.pad(probs.cumsum(dim=-1)[:, :-1], (1, 0))
        probs = probs * (before < cuts.top_p)
    if cuts.kind.min_p:
        probs = probs * (probs >= cuts.min_p * probs[:, :1])
    return Candidates(ids, probs / probs.cumsum(dim=-1)[:, -1:])


def quantise(probs: torch.Tensor, ids: torch.Tensor, keep: int) -> Distribution:
    """Return the `keep` likeliest ids of a row in parts of 65536: the draw comes after it, so rejection stays exact."""
    top = probs.topk(min(keep, probs.shape[-1]))
    shares = top.values / top.values.sum() * WHOLE
    weights = shares.floor().to(torch.int64)
    weights[0] += WHOLE - int(weights.sum())
    kept = weights > 0
    chosen = ids[top.indices][kept]
    order = chosen.argsort()
    return Distribution(tuple(chosen[order].tolist()), tuple(weights[kept][order].tolist()))


def logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return natural log probabilities of the chosen tokens and of the `top` likeliest, from unadjusted logits. All are
    finite: coordinators take any other for a violation."""
    logs = torch.log_softmax(logits.to(torch.float64), dim=-1).nan_to_num_(_LOWEST_LOGPROB).clamp_(_LOWEST_LOGPROB)
    ids = to_device(torch.tensor(tokens, dtype=torch.int64), logs.device)
    chosen = logs.gather(1, ids[:, None])[:, 0].tolist()
    best = logs.topk(top, dim=-1)
    return [
        TokenLogprobs(logprob, tuple(top_ids), tuple(top_logs))
        for logprob, top_ids, top_logs in zip(chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
