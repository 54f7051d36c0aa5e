"""An engine whose steps take at least a given time: it imitates another device, for benchmarks of timing only.

The model and its logits are real, as long as this machine is faster than the device. Noise on the logits can also make
a drafter worse or better along a text.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from outrider.engine.interface import Engine, EngineWrapper, SessionTokens, StepResult
from outrider.protocol.cost_curve import CostCurve
from outrider.protocol.errors import StartupError
from outrider.protocol.speculation import TreeShape

_SPIN_S = 0.0005  # the precision of sleep


class ThrottledEngine(EngineWrapper):
    """An engine behind a least time per step. `blur` is (position, noise): the noise from that position on, in
    standard deviations of the logits."""

    def __init__(self, inner: Engine, pace: CostCurve, blur: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__(inner)
        self._pace = pace
        self._blur = blur

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        until = time.perf_counter() + self._pace.at(sum(len(new.tokens) for new in batch)) / 1000
        starts = [self.inner.length(new.session) for new in batch] if self._blur else []
        result = self.inner.extend(batch)
        if self._blur:
            result = self._blurred(result, batch, starts)
        if (left := until - time.perf_counter() - _SPIN_S) > 0:
            time.sleep(left)
        while time.perf_counter() < until:
            pass
        return result

    def _blurred(self, result: StepResult, batch: Sequence[SessionTokens], starts: Sequence[int]) -> StepResult:
        """Add noise that is a function of the position."""
        blurred = []
        for new, start, logits in zip(batch, starts, result.logits, strict=True):
            noisy = logits.clone()
            depths = TreeShape.of(new.parents, len(new.tokens)).depths
            for index, depth in enumerate(depths[new.logits_from :]):
                position = start + depth - 1
                part = bisect_right(self._blur, position, key=lambda point: point[0])
                amount = self._blur[part - 1][1] if part else 0.0
                if amount:
                    noise = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(position))
                    noisy[index] += amount * logits[index].std() * noise.to(logits)
            blurred.append(noisy)
        return replace(result, all_logits=torch.cat(blurred))


def parse_pace(text: str) -> CostCurve:
    """Parse `1:40,16:40,32:80`: the milliseconds of a step by its number of tokens."""
    points = _points("pace", text, "tokens:ms,... with ascending tokens")
    return CostCurve(tuple(tokens for tokens, _ in points), tuple(ms for _, ms in points))


def parse_blur(text: str) -> list[tuple[int, float]]:
    """Parse `200:1.5,400:0`: positions, and the amount of noise from there on."""
    return _points("blur", text, "position:amount,... with ascending positions") if text else []


def _points(field: str, text: str, limit: str) -> list[tuple[int, float]]:
    try:
        points = [(int(at), float(value)) for at, _, value in (point.partition(":") for point in text.split(","))]
        ascending = all(a < b for (a, _), (b, _) in pairwise(points))
        if not ascending or not all(at >= 1 and 0 <= value < math.inf for at, value in points):
            raise ValueError("the points do not ascend, or are out of range")
    except ValueError as error:
        raise StartupError(f"cannot read a {field}: {error}", field=field, value=text, limit=limit) from error
    return points
