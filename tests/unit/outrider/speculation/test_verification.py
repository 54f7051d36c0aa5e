"""One sampler for a step: a session's tokens are those that it gets alone, whatever else is in the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, Guess
from outrider.speculation import noise, sampling
from outrider.speculation.acceptance import SeededNoise
from outrider.speculation.exponential_race import coupled_draws
from outrider.speculation.sampling import History
from outrider.speculation.verification import SessionSampling, VerifyResult, verify_batch

VOCAB = 5000
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CPU = torch.device("cpu")

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 2.5}},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.7, "logprobs": 0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "logit_bias": {1: -3.0, 4000: 4.0}},
    {"temperature": 0.9, "verification": Verification.REJECTION},
    {"temperature": 0.9, "verification": Verification.BLOCK, "top_p": 0.95, "logprobs": 2},
]


def _guesses(logits: torch.Tensor, params: SamplingParams, tree: bool) -> Guess:
    """Guesses that are right more often than not: the likeliest tokens."""
    tokens = tuple(logits[:-1].argmax(dim=-1).tolist())
    distributions: tuple[Distribution, ...] = ()
    if params.mode.needs_draft_probs:
        distributions = tuple(
            Distribution(tuple(sorted({token, 17})), (WHOLE // 2, WHOLE // 2) if token != 17 else (WHOLE,))
            for token in tokens
        )
    parents = (-1, -1, *range(1, len(tokens) - 1)) if tree and not distributions and len(tokens) > 1 else ()
    return Guess(len(PROMPT), 0, 0, tokens, distributions, parents=parents)


Item = tuple[Guess, SessionSampling, int]


def _items(repeats: int) -> tuple[torch.Tensor, list[Item]]:
    generator = torch.Generator().manual_seed(4)
    parts: list[torch.Tensor] = []
    items: list[Item] = []
    first = 0
    for index in range(repeats * len(KINDS)):
        params = SamplingParams(seed=index, **KINDS[index % len(KINDS)])
        rows = torch.randn(1 + index % 5, VOCAB, generator=generator) * (1 + index % 4)
        history = History(PROMPT, 4, VOCAB, CPU) if params.penalised else None
        allowed = None
        if index % 3 == 0:
            allowed = np.random.default_rng(index).random((len(rows), VOCAB)) < 0.5
        guesses = _guesses(rows, params, tree=index % 2 == 0)
        items.append((guesses, SessionSampling(params, history, SeededNoise(params.seed or 0), allowed), first))
        parts.append(rows)
        first += len(rows)
    return torch.cat(parts), items


def _verified(logits: torch.Tensor, items: Sequence[Item]) -> list[VerifyResult]:
    return verify_batch(logits, *map(list, zip(*items, strict=True)))


def test_a_sessions_result_does_not_depend_on_its_neighbours() -> None:
    logits, items = _items(4)
    together = _verified(logits, items)
    assert together == [_verified(logits, [item])[0] for item in items]
    assert _verified(logits, items[::-1])[::-1] == together
    assert sum(len(result.outcome.path) for result in together) > 0
    assert [len(result.logprobs) for result in together] == [
        0 if session.params.logprobs is None else len(result.tokens)
        for (_, session, _), result in zip(items, together, strict=True)
    ]


def test_a_step_without_sessions_gives_nothing() -> None:
    assert verify_batch(torch.empty(0, VOCAB), [], [], []) == []


@pytest.mark.parametrize("scale", [0.01, 2.5, 12.0])
def test_the_pruned_race_draws_what_the_softmax_draws(scale: float) -> None:
    """Each row by itself from its normalised probabilities, against all rows at once from logits."""
    logits = torch.randn(40, 20_011, generator=torch.Generator().manual_seed(1)) * scale
    logits[3, :19_000] = float("-inf")
    params = [SamplingParams(seed=row // 4, temperature=0.5 + row / 20) for row in range(40)]
    positions = list(range(100, 140))
    wanted = []
    for row in range(40):
        kept = sampling.candidates(logits[row : row + 1], params[row])
        key = noise.key(row // 4, noise.Use.COUPLED, positions[row])
        wanted.append(int(noise.arrival_times([key], kept.ids, kept.probs).argmin()))
    assert coupled_draws(logits, params, positions).tolist() == wanted


def test_a_row_without_finite_weights_gives_the_first_id_and_spares_its_neighbours() -> None:
    logits = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(seed=9)] * 3
    wanted = coupled_draws(logits, params, [5, 6, 7]).tolist()
    logits[0] = float("-inf")
    logits[1, 77] = float("nan")
    assert coupled_draws(logits, params, [5, 6, 7]).tolist() == [0, 0, wanted[2]]


def test_counting_output_leaves_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions append on the event loop, which must not wait for a device."""
    history = History(PROMPT, 4, VOCAB, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *_: pytest.fail("a tensor was made"))
        history.append([1, 2, 3])


def test_a_long_output_is_counted_like_a_short_one() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    logits = torch.zeros(1, VOCAB)
    history = History(PROMPT, 4, VOCAB, CPU)
    for token in range(300):
        history.append([token % 7])
        sampling.adjust(logits, params, history, [()])
    whole = History([*PROMPT, *(token % 7 for token in range(300))], 4, VOCAB, CPU)
    assert torch.equal(sampling.adjust(logits, params, history, [()]), sampling.adjust(logits, params, whole, [()]))


def test_log_probabilities_of_a_branch_are_those_of_its_own_rows() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    best = logits.argmax(dim=-1).tolist()
    guess = Guess(len(PROMPT), 0, 0, (best[0] + 1, best[0], best[2]), parents=(-1, -1, 1))
    params = SamplingParams(temperature=0.0, seed=1, logprobs=1)
    (result,) = verify_batch(logits, [guess], [SessionSampling(params, None, SeededNoise(1))], [0])
    assert result.outcome.path == (2, 3)
    assert [each.top_ids for each in result.logprobs] == [(best[row],) for row in (0, 2, 3)]
    wanted = torch.log_softmax(logits.double(), dim=-1)[[0, 2, 3], list(result.tokens)]
    assert [each.logprob for each in result.logprobs] == pytest.approx(wanted.tolist())
