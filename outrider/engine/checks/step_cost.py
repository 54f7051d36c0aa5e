"""The cost of a step on this machine, by its number of tokens, measured before a worker serves."""

from __future__ import annotations

import time
from itertools import accumulate

from outrider.engine.interface import Engine, SessionTokens, prefill
from outrider.engine.paged.block_manager import BLOCK_TOKENS, blocks_for
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32)
_FEWEST = 4  # of them, which tell whether a guess pays: a CPU measures short steps at many moments, as other processes
_SHORT_MS = 8.0  # of the fleet start at the same time
_MORE_TOKENS = (64, 128, 256, 512)  # the first ones may all take the time in which a device reads the weights
_GPU_SESSION_TOKENS = 16
_CONTEXT = 128
_ROUNDS = 2  # and one on a GPU that captures graphs
_BUDGET_S = (2.0, 6.0)  # on a CPU and on a GPU: a large model gets fewer rounds, so that its start is not delayed
_FEW = 16  # tokens of the context if they alone take _LONG_MS
_LONG_MS = 300.0  # nothing is measured after a step of max(TOKENS) tokens or more that takes as long
_PROPORTIONAL = 1.7  # times as long as half of the tokens: the slope is known, after more than max(TOKENS) for good
_TOO_LONG_MS = 1000.0  # with a known slope, nothing is measured after a step of 8 tokens or more that takes as long


def measure_cost(engine: Engine) -> CostCurve:
    """Return the best times of a few rounds: of one session's steps; on a GPU, of many sessions'."""
    on_gpu = engine.device.type == "cuda"
    room = min(engine.info.context_length, engine.capacity_tokens)
    context = min(_CONTEXT, (room - max(TOKENS)) // 2)
    if context < 1:
        return UNKNOWN_COST
    session_room = BLOCK_TOKENS * blocks_for(context + _GPU_SESSION_TOKENS)
    most = _GPU_SESSION_TOKENS * max(1, engine.capacity_tokens // session_room) if on_gpu else room - context
    counts = [tokens for tokens in (*TOKENS, *_MORE_TOKENS) if tokens <= most]
    width = _GPU_SESSION_TOKENS if on_gpu else most  # of a session
    sessions = [f"cost {index}" for index in range(-(-counts[-1] // width))]
    few = 0 if on_gpu else min(_FEW, context)
    if few and _step_ms(engine, [SessionTokens(sessions[0], [0] * few)], few) > _LONG_MS:
        context = few
    for session in sessions:
        prefill(engine, session, [0] * (context - few))
    best = dict.fromkeys(counts, float("inf"))
    started = time.perf_counter()
    for round_ in range(_ROUNDS + on_gpu):
        for index, tokens in enumerate(counts):
            shares = [min(width, tokens - first) for first in range(0, tokens, width)]
            batch = [SessionTokens(session, [0] * share) for session, share in zip(sessions, shares, strict=False)]
            if _is_last(engine, batch, context, best, tokens):
                del counts[index + 1 :]
            are_short = index >= _FEWEST and not on_gpu and best[1] <= _SHORT_MS
            for again in counts[:_FEWEST] if are_short else ():
                best[again] = min(best[again], _step_ms(engine, [SessionTokens(sessions[0], [0] * again)], context))
        if time.perf_counter() - started > _BUDGET_S[on_gpu] and round_ >= on_gpu:
            break
    for session in sessions:
        engine.free(session)
    return CostCurve(tuple(counts), rising([best[tokens] for tokens in counts]))


def _is_last(engine: Engine, batch: list[SessionTokens], context: int, best: dict[int, float], tokens: int) -> bool:
    """Time a step. Return whether no step of more tokens needs to be measured."""
    for _ in range(2):  # a single long step may be a stall
        best[tokens] = ms = min(best[tokens], _step_ms(engine, batch, context))
        linear = ms > _PROPORTIONAL * best.get(tokens // 2, ms)
        known = linear and (tokens > max(TOKENS) or (tokens >= 8 and ms > _TOO_LONG_MS))
        if engine.device.type == "cuda" or not (known or (tokens >= max(TOKENS) and ms > _LONG_MS)):
            return False
    return True


def _step_ms(engine: Engine, batch: list[SessionTokens], context: int) -> float:
    began = time.perf_counter()
    engine.extend(batch).all_logits.argmax(dim=-1).tolist()  # waits for a GPU
    taken_ms = 1000 * (time.perf_counter() - began)
    for new in batch:
        engine.truncate(new.session, context)
    return taken_ms


def rising(times: list[float]) -> tuple[float, ...]:
    """Return the times made monotonic: more tokens never cost less, the rest is noise."""
    return tuple(accumulate(reversed(times), min))[::-1]
