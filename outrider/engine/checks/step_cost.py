"""The cost of a step on this machine, by its number of tokens, measured before a worker serves."""

from __future__ import annotations

import time

from outrider.engine.interface import Engine, SessionTokens, prefill
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32)
_CONTEXT = 128
_ROUNDS = 3
_BUDGET_S = 6.0  # a large model gets fewer rounds, so that its start is not delayed


def measure_cost(engine: Engine) -> CostCurve:
    """Return the best times of a few rounds."""
    context = min(_CONTEXT, (min(engine.info.context_length, engine.capacity_tokens) - max(TOKENS)) // 2)
    if context < 1:
        return UNKNOWN_COST
    session = "cost"
    prefill(engine, session, [0] * context)
    best = [float("inf")] * len(TOKENS)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        for index, tokens in enumerate(TOKENS):
            began = time.perf_counter()
            result = engine.extend([SessionTokens(session, [0] * tokens)])
            result.all_logits.argmax(dim=-1).tolist()  # waits for a GPU
            best[index] = min(best[index], 1000 * (time.perf_counter() - began))
            engine.truncate(session, context)
        if time.perf_counter() - started > _BUDGET_S:
            break
    engine.free(session)
    return CostCurve(TOKENS, rising(best))


def rising(times: list[float]) -> tuple[float, ...]:
    """Return the times made monotonic: more tokens never cost less, the rest is noise."""
    for index in range(len(times) - 2, -1, -1):
        times[index] = min(times[index], times[index + 1])
    return tuple(times)
