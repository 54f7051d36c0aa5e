"""Toy models with a given acceptance. The module imports torch and is therefore imported on use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.bench.common.remote_pair import ReferenceAnswers, ToyPair
from outrider.engine.interface import SessionTokens, prefill
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation.exponential_race import shared_choices, shared_draw
from outrider.testing.toy_models import make_model

_SHARPNESS = 1.8  # of the target: scale of its logits
_CONTEXT = 4096
_RUNNERS_UP = 2
_OPTIONS = EngineOptions(device="cpu", kv_tokens=2 * _CONTEXT)


def make_pair(folder: Path, acceptance: float, answers: ReferenceAnswers) -> ToyPair:
    """Perturb a copy of the target until its first guesses have about this acceptance on these answers."""
    target = make_model(folder / "target", seed=1, sharpness=_SHARPNESS, context=_CONTEXT)
    reference = _generate(target, answers)
    low, high = 0.0, 0.4
    closest = ToyPair(target, target, 1.0, 0.0)
    for turn in range(7):
        blur = math.sqrt(max(low, 1e-4) * high) if low else high / 8
        draft = make_model(folder / f"draft-{turn}", seed=2, like=target, blur=blur, context=_CONTEXT)
        first, gain = _compare(draft, reference, len(answers.prompt))
        if abs(first - acceptance) < abs(closest.acceptance - acceptance):
            closest = ToyPair(target, draft, first, gain)
        low, high = (blur, high) if first > acceptance else (low, blur)
    return closest


def _generate(target: Path, answers: ReferenceAnswers) -> dict[int, list[int]]:
    """Return the target's plain output with its prompt, by seed."""
    engine = load_model(str(target), _OPTIONS).engine
    outputs = {}
    for seed in range(answers.count):
        tokens = list(answers.prompt)
        logits = prefill(engine, "generate", tokens)
        for _ in range(answers.tokens):
            tokens += shared_draw(logits[None], _params(seed), [len(tokens)])
            logits = engine.extend([SessionTokens("generate", tokens[-1:])]).logits[0][-1]
        engine.free("generate")
        outputs[seed] = tokens
    return outputs


def _compare(draft: Path, outputs: Mapping[int, list[int]], start: int) -> tuple[float, float]:
    """Return the acceptance of first guesses, and the share of failed ones whose token is among the runners-up."""
    engine = load_model(str(draft), _OPTIONS).engine
    ranks: list[int | None] = []
    for seed, tokens in outputs.items():
        engine.extend([SessionTokens("compare", tokens[: start - 1], logits_from=start - 1)])
        logits = [engine.extend([SessionTokens("compare", [it])]).logits[0].clone() for it in tokens[start - 1 : -1]]
        engine.free("compare")
        choices = shared_choices(torch.cat(logits), _params(seed), range(start, len(tokens)), 1 + _RUNNERS_UP)
        for proposed, token in zip(choices, tokens[start:], strict=True):
            ranks.append(next((rank for rank, (choice, _) in enumerate(proposed) if choice == token), None))
    first = ranks.count(0)
    runner_up = sum(rank is not None and rank > 0 for rank in ranks)
    return first / len(ranks), runner_up / max(1, len(ranks) - first)


def _params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)
