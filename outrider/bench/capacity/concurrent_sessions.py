"""Concurrent sessions on one verifier, and their throughput while all of them decode."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outrider.bench.common.remote_pair import RemoteSetup
from outrider.bench.common.timed_output import TimedOutput, timed
from outrider.client.sync import Client
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
    start = threading.Barrier(sessions, timeout=_START_TIMEOUT_S)

    def generate(number: int) -> TimedOutput:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True)
        with Client(running.endpoints) as client:
            start.wait()
            return timed(client.generate(tokens=_PROMPT, params=params, **request_options))

    with ThreadPoolExecutor(sessions) as threads:
        outputs = list(threads.map(generate, range(sessions)))
    first = max(each.arrivals[0][0] for each in outputs)
    last = min(each.arrivals[-1][0] for each in outputs)
    token_ms = []
    for output in outputs:
        inside = [(at, count) for at, count in output.arrivals if first <= at <= last]
        token_ms.append(1000 * (inside[-1][0] - inside[0][0]) / max(1, sum(count for _, count in inside[1:])))
    stats = [output.finished.stats for output in outputs]
    guesses, steps = sum(sum(each.offered_per_position) for each in stats), sum(each.steps for each in stats)
    return ConcurrentFigures(
        sessions, statistics.median(token_ms), sum(1000 / max(1e-6, ms) for ms in token_ms), guesses / steps
    )
