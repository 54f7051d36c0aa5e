"""The cost of a step on this machine, by its number of tokens, measured before a worker serves."""

from __future__ import annotations

import time

from outrider.engine.interface import Engine, SessionTokens, prefill
from outrider.engine.paged.block_manager import BLOCK_TOKENS, blocks_for
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32)
_GPU_TOKENS = (*TOKENS, 64, 128, 256, 512)  # the first ones all take the time in which a GPU reads the weights
_GPU_SESSION_TOKENS = 16
_CPU_PROMPTS = (64, 128, 256, 512)  # of one session, without logits of all
_CONTEXT = 128
_ROUNDS = 3
_BUDGET_S = 6.0  # a large model gets fewer rounds, so that its start is not delayed
_LONG_MS = 300.0  # nothing is measured after a step as long


def measure_cost(engine: Engine) -> CostCurve:
    """Return the best times of a few rounds: of one session's steps and prompts; on a GPU, of many sessions' steps."""
    on_gpu = engine.device.type == "cuda"
    width = _GPU_SESSION_TOKENS if on_gpu else max(TOKENS)
    context = min(_CONTEXT, (min(engine.info.context_length, engine.capacity_tokens) - max(TOKENS)) // 2)
    if context < 1:
        return UNKNOWN_COST
    most = max(1, engine.capacity_tokens // (blocks_for(context + width) * BLOCK_TOKENS))
    counts = [tokens for tokens in (_GPU_TOKENS if on_gpu else TOKENS) if tokens <= most * width]
    sessions = [f"cost {index}" for index in range(-(-counts[-1] // width))]
    for session in sessions:
        prefill(engine, session, [0] * context)
    best = [float("inf")] * len(counts)
    started = time.perf_counter()
    for round_ in range(_ROUNDS):
        for index, tokens in enumerate(counts):
            shares = [min(width, tokens - first) for first in range(0, tokens, width)]
            batch = [SessionTokens(session, [0] * share) for session, share in zip(sessions, shares, strict=False)]
            best[index] = min(best[index], _step_ms(engine, batch, context))
        if time.perf_counter() - started > _BUDGET_S and round_ >= on_gpu:  # a GPU's first round captures graphs
            break
    room = min(engine.info.context_length, engine.capacity_tokens) - context
    for tokens in () if on_gpu else _CPU_PROMPTS:
        if tokens <= room and best[-1] < _LONG_MS:
            prompt = SessionTokens(sessions[0], [0] * tokens, logits_from=tokens - max(TOKENS))
            counts, best = [*counts, tokens], [*best, min(_step_ms(engine, [prompt], context) for _ in range(2))]
    for session in sessions:
        engine.free(session)
    return CostCurve(tuple(counts), rising(best))


def _step_ms(engine: Engine, batch: list[SessionTokens], context: int) -> float:
    began = time.perf_counter()
    engine.extend(batch).all_logits.argmax(dim=-1).tolist()  # waits for a GPU
    taken_ms = 1000 * (time.perf_counter() - began)
    for new in batch:
        engine.truncate(new.session, context)
    return taken_ms


def rising(times: list[float]) -> tuple[float, ...]:
    """Return the times made monotonic: more tokens never cost less, the rest is noise."""
    for index in range(len(times) - 2, -1, -1):
        times[index] = min(times[index], times[index + 1])
    return tuple(times)
