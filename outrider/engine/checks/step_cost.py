"""What a step costs on this machine, by its rows: measured before a worker serves, so that nobody has to guess."""

from __future__ import annotations

import time

from outrider.engine.interface import Engine, SessionTokens, prefill
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
_CONTEXT = 128
_ROUNDS = 3
_BUDGET_S = 6.0


def measure_cost(engine: Engine) -> CostCurve:
    """Best of a few rounds; of one round where the model is so large that more would keep users waiting."""
    context = min(_CONTEXT, (min(engine.info.context_length, engine.capacity_tokens) - max(ROWS)) // 2)
    if context < 1:
        return UNKNOWN_COST
    session = "cost"
    prefill(engine, session, [0] * context)
    best = [float("inf")] * len(ROWS)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        for index, rows in enumerate(ROWS):
            began = time.perf_counter()
            result = engine.extend([SessionTokens(session, [0] * rows)])
            result.all_logits.argmax(dim=-1).tolist()  # on a GPU: until it is done
            best[index] = min(best[index], 1000 * (time.perf_counter() - began))
            engine.truncate(session, context)
        if time.perf_counter() - started > _BUDGET_S:
            break
    engine.free(session)
    return CostCurve(ROWS, _rising(best))


def _rising(times: list[float]) -> tuple[float, ...]:
    """More rows never cost less: what says so is noise."""
    for index in range(len(times) - 2, -1, -1):
        times[index] = min(times[index], times[index + 1])
    return tuple(times)
