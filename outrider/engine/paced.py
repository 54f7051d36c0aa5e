"""An engine that answers no sooner than another device would: for benchmarks of timing only.

The model and its answers are real; only the time of a step is that of the
device that is being studied, as long as this machine is faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from outrider.engine.interface import Engine, Rows, StepResult
from outrider.errors import StartupError
from outrider.messages import CostCurve, ModelInfo

_SPIN_S = 0.0005  # sleeping is not exact to less


class PacedEngine:
    def __init__(self, engine: Engine, pace: CostCurve) -> None:
        self._engine = engine
        self._pace = pace

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def capacity_tokens(self) -> int:
        return self._engine.capacity_tokens

    @property
    def cached_tokens(self) -> int:
        return self._engine.cached_tokens

    @property
    def idle_tokens(self) -> int:
        return self._engine.idle_tokens

    def length(self, session: str) -> int:
        return self._engine.length(session)

    def adopt(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return self._engine.adopt(session, tokens, salt)

    def extend(self, batch: Sequence[Rows]) -> StepResult:
        until = time.perf_counter() + self._pace.at(sum(len(rows.tokens) for rows in batch)) / 1000
        result = self._engine.extend(batch)
        if (left := until - time.perf_counter() - _SPIN_S) > 0:
            time.sleep(left)
        while time.perf_counter() < until:
            pass
        return result

    def truncate(self, session: str, length: int) -> None:
        self._engine.truncate(session, length)

    def keep(self, session: str, base: int, rows: Sequence[int]) -> None:
        self._engine.keep(session, base, rows)

    def fork(self, session: str, copy: str) -> None:
        self._engine.fork(session, copy)

    def free(self, session: str) -> None:
        self._engine.free(session)


def parse_pace(text: str) -> CostCurve:
    """`1:40,16:40,32:80`: milliseconds of a step by the tokens that go through it."""
    try:
        points = [(int(rows), float(ms)) for rows, _, ms in (point.partition(":") for point in text.split(","))]
        sane = all(a < b for (a, _), (b, _) in pairwise(points)) and all(rows >= 1 and ms >= 0 for rows, ms in points)
        if not sane:
            raise ValueError("the points do not ascend")
    except ValueError as error:
        raise StartupError(
            f"cannot read a pace: {error}", field="pace", value=text, limit="rows:ms,... with ascending rows"
        ) from error
    return CostCurve(tuple(rows for rows, _ in points), tuple(ms for _, ms in points))
