"""Concurrent sessions on one verifier, and their throughput while all of them decode."""

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
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ConcurrentFigures:
    sessions: int
    token_ms: float  # median over the sessions of their mean time between tokens
    tokens_per_s: float  # of all sessions
    guesses_per_step: float  # checked guesses per step of a session


def run_sessions(
    running: RemoteSetup, sessions: int, tokens: int, request_options: Mapping[str, Any]
) -> ConcurrentFigures:
    """Start all sessions at once and measure the time in which all of them decode."""
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(sessions)]
    steps, guesses = [0] * sessions, [0] * sessions
    start = threading.Barrier(sessions, timeout=_START_TIMEOUT_S)

    def generate(number: int) -> None:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True)
        with Client(running.endpoints) as client:
            start.wait()
            for reply in client.generate(tokens=_PROMPT, params=params, **request_options):
                if isinstance(reply, Tokens):
                    arrivals[number].append((time.perf_counter(), len(reply.token_ids)))
                elif isinstance(reply, Finished):
                    steps[number], guesses[number] = reply.stats.steps, sum(reply.stats.offered_per_position)

    with ThreadPoolExecutor(sessions) as threads:
        list(threads.map(generate, range(sessions)))
    first, last = max(chunks[0][0] for chunks in arrivals), min(chunks[-1][0] for chunks in arrivals)
    token_ms = []
    for chunks in arrivals:
        inside = [(at, count) for at, count in chunks if first <= at <= last]
        token_ms.append(1000 * (inside[-1][0] - inside[0][0]) / max(1, sum(count for _, count in inside[1:])))
    return ConcurrentFigures(
        sessions, statistics.median(token_ms), sum(1000 / max(1e-6, ms) for ms in token_ms), sum(guesses) / sum(steps)
    )
