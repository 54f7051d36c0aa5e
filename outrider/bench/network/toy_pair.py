"""Makes a pair of tiny models whose guesses hold as often as wanted. Runs both, so it is loaded on use, with torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.bench.common.remote_pair import Answers, ToyPair
from outrider.engine.interface import SessionTokens, prefill
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.sampling_params import SamplingParams
from outrider.speculation.exponential_race import shared_choices, shared_draw
from outrider.testing.toy_models import make_model

_SHARPNESS = 1.8  # of the target: how peaked what it says is
_CONTEXT = 4096
_RUNNERS_UP = 2
_OPTIONS = EngineOptions(device="cpu", kv_tokens=2 * _CONTEXT)


def make_pair(folder: Path, acceptance: float, answers: Answers) -> ToyPair:
    """Blur a copy of the target until its first guesses hold about so often, in these answers."""
    target = make_model(folder / "target", seed=1, sharpness=_SHARPNESS, context=_CONTEXT)
    said = _say(target, answers)
    low, high = 0.0, 0.4
    found = ToyPair(target, target, 1.0, 0.0)
    for turn in range(7):
        blur = math.sqrt(max(low, 1e-4) * high) if low else high / 8
        draft = make_model(folder / f"draft-{turn}", seed=2, like=target, blur=blur, context=_CONTEXT)
        first, gain = _compare(draft, said, len(answers.prompt))
        if abs(first - acceptance) < abs(found.acceptance - acceptance):
            found = ToyPair(target, draft, first, gain)
        low, high = (blur, high) if first > acceptance else (low, blur)
    return found


def _say(target: Path, answers: Answers) -> dict[int, list[int]]:
    """What the target says on its own, by seed, to compare with."""
    engine = load_model(str(target), _OPTIONS).engine
    said = {}
    for seed in range(answers.count):
        tokens = list(answers.prompt)
        logits = prefill(engine, "say", tokens)
        for _ in range(answers.tokens):
            tokens += shared_draw(logits[None], _drawing(seed), [len(tokens)])
            logits = engine.extend([SessionTokens("say", tokens[-1:])]).logits[0][-1]
        engine.free("say")
        said[seed] = tokens
    return said


def _compare(draft: Path, said: Mapping[int, list[int]], start: int) -> tuple[float, float]:
    """How often a drafter's first guess would have held, and how often of the others a runner-up."""
    engine = load_model(str(draft), _OPTIONS).engine
    ranks: list[int | None] = []
    for seed, tokens in said.items():
        engine.extend([SessionTokens("see", tokens[: start - 1], logits_from=start - 1)])
        seen = [engine.extend([SessionTokens("see", [token])]).logits[0].clone() for token in tokens[start - 1 : -1]]
        engine.free("see")
        choices = shared_choices(torch.cat(seen), _drawing(seed), range(start, len(tokens)), 1 + _RUNNERS_UP)
        for offered, truth in zip(choices, tokens[start:], strict=True):
            ranks.append(next((rank for rank, (token, _) in enumerate(offered) if token == truth), None))
    first = ranks.count(0)
    beside = sum(rank is not None and rank > 0 for rank in ranks)
    return first / len(ranks), beside / max(1, len(ranks) - first)


def _drawing(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)
