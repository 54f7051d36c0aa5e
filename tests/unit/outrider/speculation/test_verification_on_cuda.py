"""The sampler on an emulated CUDA device: few launches, one wait, no mixed devices, the CPU's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, Guess
from outrider.speculation.acceptance import SeededNoise
from outrider.speculation.sampling import History
from outrider.speculation.verification import SessionSampling, VerifyResult, verify_batch
from tests.emulated_cuda import Counts, emulated_cuda

SESSIONS, GUESSES = 32, 8
FIRSTS = [index * (1 + GUESSES) for index in range(SESSIONS)]


def _logits(vocab: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the logits of a step, and guesses that are often right."""
    logits = torch.randn(SESSIONS * (1 + GUESSES), vocab, generator=torch.Generator().manual_seed(3)) * 4
    return logits, logits.argmax(dim=-1).view(SESSIONS, -1)[:, :GUESSES].tolist()


def _sessions(given: dict[str, Any], vocab: int, device: torch.device) -> list[SessionSampling]:
    sessions = []
    for seed in range(SESSIONS):
        params = SamplingParams(seed=seed, **given)
        history = History([1, 2, 3, 4], 2, vocab, device) if params.penalised else None
        sessions.append(SessionSampling(params, history, SeededNoise(seed)))
    return sessions


def _blocks(tokens: list[list[int]], params: SamplingParams) -> list[Guess]:
    certain = [tuple(Distribution((token,), (WHOLE,)) for token in guessed) for guessed in tokens]
    drafts = certain if params.mode.needs_draft_probs else [()] * len(tokens)
    return [Guess(10, 0, 0, tuple(guessed), draft) for guessed, draft in zip(tokens, drafts, strict=True)]


def _verify(logits: torch.Tensor, tokens: list[list[int]], given: dict[str, Any]) -> Callable[[], list[VerifyResult]]:
    """Return a step over the same sessions, to run again."""
    sessions = _sessions(given, logits.shape[1], logits.device)
    blocks = _blocks(tokens, sessions[0].params)
    return lambda: verify_batch(logits, blocks, sessions, FIRSTS)


@pytest.mark.parametrize(("given", "launches"), [({"temperature": 1.0}, 6), ({"temperature": 0.0}, 2)])
def test_a_step_of_32_sessions_takes_few_launches_and_waits_once(given: dict[str, Any], launches: int) -> None:
    logits, tokens = _logits(128_256)
    wanted = _verify(logits, tokens, given)()
    with emulated_cuda() as device:
        assert _verify(device.place(logits), tokens, given)() == wanted
    assert device.counts.all_launches == launches, device.counts
    assert device.counts.syncs.total() == 1, device.counts


@pytest.mark.parametrize(
    ("given", "launches", "syncs"),
    [
        ({"temperature": 0.8, "top_k": 20, "min_p": 0.01}, 60, 1),
        ({"temperature": 0.8, "top_p": 0.9}, 90, 2),
        ({"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5}, 40, 1),
        ({"temperature": 0.0, "logit_bias": {5: 3.0}, "logprobs": 2}, 20, 4),
        ({"temperature": 0.8, "verification": Verification.REJECTION}, 90, 2),
        ({"temperature": 0.8, "verification": Verification.BLOCK}, 140, 3),
    ],
)
def test_other_draws_stay_on_the_device(given: dict[str, Any], launches: int, syncs: int) -> None:
    logits, tokens = _logits(5000)
    wanted = _verify(logits, tokens, given)()
    with emulated_cuda() as device:
        step = _verify(device.place(logits), tokens, given)
        assert step() == wanted  # with what is done once for a session
        device.counts = Counts()
        assert step() == wanted
    assert 0 < device.counts.all_launches <= launches, device.counts
    assert 0 < device.counts.syncs.total() <= syncs, device.counts
