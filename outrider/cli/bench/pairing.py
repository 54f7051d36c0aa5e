"""Makes a pair of tiny models whose guesses hold as often as wanted. Runs both, so it is loaded on use, with torch."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from outrider.cli.bench.far import Pair
from outrider.drawing import shared_choices, shared_draw
from outrider.engine.interface import Rows, prefill
from outrider.engine.load import EngineOptions, load_model
from outrider.messages import SamplingParams
from outrider.tiny import make_model

_SHARPNESS = 1.8  # of the target: how peaked what it says is
_CONTEXT = 4096
_LOOKED_AT = 400  # tokens of which the pair's acceptance is read off
_RUNNERS_UP = 2
_DRAWING = SamplingParams(temperature=1.0, seed=7)


def make_pair(folder: Path, acceptance: float) -> Pair:
    """Blur a copy of the target until its first guesses hold about so often."""
    target = make_model(folder / "target", seed=1, sharpness=_SHARPNESS, context=_CONTEXT)
    said = _say(target)
    low, high = 0.0, 0.4
    found = Pair(target, target, 1.0, 0.0)
    for turn in range(7):
        blur = math.sqrt(max(low, 1e-4) * high) if low else high / 8
        draft = make_model(folder / f"draft-{turn}", seed=2, like=target, blur=blur, context=_CONTEXT)
        first, gain = _compare(draft, said)
        if abs(first - acceptance) < abs(found.acceptance - acceptance):
            found = Pair(target, draft, first, gain)
        low, high = (blur, high) if first > acceptance else (low, blur)
    return found


def _say(target: Path) -> list[int]:
    """What the target says on its own, to compare with."""
    engine = load_model(str(target), EngineOptions(device="cpu", kv_tokens=2 * _LOOKED_AT)).engine
    tokens = [1, 2, 3]
    logits = prefill(engine, "say", tokens)
    for _ in range(_LOOKED_AT):
        tokens += shared_draw(logits[None], _DRAWING, [len(tokens)])
        logits = engine.extend([Rows("say", tokens[-1:])]).logits[0][-1]
    return tokens


def _compare(draft: Path, said: list[int]) -> tuple[float, float]:
    """How often a drafter's first guess would have held, and how often of the others a runner-up."""
    engine = load_model(str(draft), EngineOptions(device="cpu", kv_tokens=2 * _LOOKED_AT)).engine
    engine.extend([Rows("see", said[:3], logits_from=3)])
    logits = torch.cat([engine.extend([Rows("see", [token])]).logits[0].clone() for token in said[3:-1]])
    choices = shared_choices(logits, _DRAWING, list(range(4, len(said))), 1 + _RUNNERS_UP)
    ranks = [
        next((rank for rank, (token, _) in enumerate(offered) if token == truth), None)
        for offered, truth in zip(choices, said[4:], strict=True)
    ]
    first = ranks.count(0)
    beside = sum(rank is not None and rank > 0 for rank in ranks)
    return first / len(ranks), beside / max(1, len(ranks) - first)
