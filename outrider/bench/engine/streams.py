"""Streams of a served model: gaps between tokens during a long prefill, and time to the first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.bench.common.report import Times
from outrider.bench.engine.results import EngineExtent, ServedTimes, some_tokens
from outrider.client.sync import Client, Started, Tokens
from outrider.launch.stack import LaunchPlan, stack
from outrider.protocol.sampling_params import SamplingParams

_STREAMS = 4
_STREAM_PROMPT = 64
_STREAM_TOKENS = 1024
_WARM_UP_TOKENS = 8  # of each stream, not counted
_UNDISTURBED_TOKENS = 48  # of each stream, before the long prompt is sent
_LONG_PROMPT = 4_000
_SHARED_PREFIX = 1_000
_SUFFIX = 8
_TIMEOUT_S = 1800.0
_POLL_S = 0.005


@dataclass(slots=True)
class _PlainStream:
    """Stream of plain decoding, with the arrival times of its tokens."""

    session_id: str = ""
    times: list[float] = field(default_factory=list)
    thread: Future[None] = field(default_factory=Future)

    def generate(self, client: Client, prompt: Sequence[int], max_tokens: int) -> None:
        for reply in client.generate(tokens=prompt, params=_greedy(max_tokens), gamma=0):
            if isinstance(reply, Started):
                self.session_id = reply.session_id
            elif isinstance(reply, Tokens):
                self.times.append(time.perf_counter())

    def gaps(self, counts: Callable[[float, float], bool]) -> list[float]:
        return [1000 * (b - a) for a, b in pairwise(self.times) if counts(a, b)]


def measure(plan: LaunchPlan, extent: EngineExtent, notify: Callable[[str], None]) -> ServedTimes:
    notify("starting the services")
    with stack(plan) as running, Client(running.endpoints, timeout_s=_TIMEOUT_S) as client:
        model = client.model()
        notify("prompts with a shared prefix")
        first, second = _first_tokens(client, extent.prompts, model.vocab_size, model.context_length)
        quiet: list[float] = []
        during: list[float] = []
        for number in range(extent.prefills):
            notify(f"a long prompt during {_STREAMS} streams, {number + 1} of {extent.prefills}")
            before, while_prefilling = _gaps(client, number, model.vocab_size, model.context_length)
            quiet += before
            during += while_prefilling
    return ServedTimes(Times(quiet), Times(during), first, second)


def _first_tokens(client: Client, prompts: int, vocab_size: int, context_length: int) -> tuple[Times, Times]:
    """Send pairs of prompts that differ in their last tokens only. The first pair is not counted."""
    shared = min(_SHARED_PREFIX, context_length - _SUFFIX - 1)
    waits: dict[str, list[float]] = {"first": [], "second": []}
    for number in range(prompts + 1):
        beginning = some_tokens(f"shared {number}", shared, vocab_size)
        for name, taken in waits.items():
            sent, received = _first_token(client, beginning + some_tokens(f"{name} {number}", _SUFFIX, vocab_size))
            if number:
                taken.append(1000 * (received - sent))
    return Times(waits["first"]), Times(waits["second"])


def _gaps(client: Client, number: int, vocab_size: int, context_length: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds between tokens of running streams, first undisturbed, then during a long prefill."""
    budget = min(_STREAM_TOKENS, context_length - _STREAM_PROMPT)
    long_prompt = some_tokens(f"long {number}", min(_LONG_PROMPT, context_length - 1), vocab_size)
    streams = [_PlainStream() for _ in range(_STREAMS)]
    with ThreadPoolExecutor(_STREAMS) as threads:
        for i, stream in enumerate(streams):
            prompt = some_tokens(f"stream {number} {i}", _STREAM_PROMPT, vocab_size)
            stream.thread = threads.submit(stream.generate, client, prompt, budget)
        try:
            _wait_until(streams, lambda stream: len(stream.times) >= _WARM_UP_TOKENS)
            warmed_up = time.perf_counter()
            _wait_until(streams, lambda stream: len(stream.times) >= _WARM_UP_TOKENS + _UNDISTURBED_TOKENS)
            sent, received = _first_token(client, long_prompt)
            _wait_until(streams, lambda stream: stream.times[-1] > received)
        finally:
            for stream in streams:
                if not stream.thread.done():
                    client.cancel(stream.session_id)
    for stream in streams:
        stream.thread.result()
    quiet = [gap for stream in streams for gap in stream.gaps(lambda a, b: a > warmed_up and b < sent)]
    return quiet, [gap for stream in streams for gap in stream.gaps(lambda a, b: b > sent and a < received)]


def _wait_until(streams: list[_PlainStream], reached: Callable[[_PlainStream], bool]) -> None:
    """Wait until every stream has ended or meets the condition. Raise the error of a failed stream."""
    while not all(stream.thread.done() or reached(stream) for stream in streams):
        time.sleep(_POLL_S)
    for stream in streams:
        if stream.thread.done():
            stream.thread.result()


def _first_token(client: Client, prompt: Sequence[int]) -> tuple[float, float]:
    """Return when the request was sent and when its first token arrived."""
    sent = time.perf_counter()
    received = [
        time.perf_counter()
        for reply in client.generate(tokens=prompt, params=_greedy(1), gamma=0)
        if not isinstance(reply, Started)
    ]
    return sent, received[0]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
