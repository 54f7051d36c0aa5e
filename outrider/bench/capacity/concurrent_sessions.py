"""Sessions that a verifier serves together, and what each of them gets while all of them decode."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outrider.bench.common.remote_pair import RemoteSetup
from outrider.client.sync import Client, Finished, Tokens
from outrider.protocol.sampling_params import SamplingParams

_PROMPT = tuple(range(40, 56))
_TOGETHER_S = 30.0


@dataclass(frozen=True, slots=True)
class ConcurrentFigures:
    sessions: int
    token_ms: float  # of each, between its tokens on average: the median of the sessions
    tokens_per_s: float  # of all of them
    guesses_per_step: float  # checked, per step of a session


def crowd(running: RemoteSetup, sessions: int, tokens: int, wishes: Mapping[str, Any]) -> ConcurrentFigures:
    """All begin together; what counts is the time in which all of them decode."""
    took: list[list[tuple[float, int]]] = [[] for _ in range(sessions)]
    steps, guesses = [0] * sessions, [0] * sessions
    start = threading.Barrier(sessions, timeout=_TOGETHER_S)

    def follow(number: int) -> None:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True)
        with Client(running.endpoints) as client:
            start.wait()
            for reply in client.generate(tokens=_PROMPT, params=params, **wishes):
                if isinstance(reply, Tokens):
                    took[number].append((time.perf_counter(), len(reply.token_ids)))
                elif isinstance(reply, Finished):
                    steps[number], guesses[number] = reply.stats.steps, sum(reply.stats.offered_per_position)

    with ThreadPoolExecutor(sessions) as threads:
        list(threads.map(follow, range(sessions)))
    first, last = max(chunks[0][0] for chunks in took), min(chunks[-1][0] for chunks in took)
    paces = []
    for chunks in took:
        inside = [(at, count) for at, count in chunks if first <= at <= last]
        paces.append(1000 * (inside[-1][0] - inside[0][0]) / max(1, sum(count for _, count in inside[1:])))
    return ConcurrentFigures(
        sessions, statistics.median(paces), sum(1000 / max(1e-6, pace) for pace in paces), sum(guesses) / sum(steps)
    )
