"""What users of a served model feel: gaps between tokens beside a long prompt, and the wait for the first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.bench.common.report import Times
from outrider.bench.engine.results import EngineExtent, Served, some_tokens
from outrider.client.sync import Client, Started, Tokens
from outrider.launch.stack import LaunchPlan, stack
from outrider.protocol.sampling_params import SamplingParams

_STREAMS = 4
_STREAM_PROMPT = 64
_STREAM_TOKENS = 1024
_SETTLING = 8  # tokens of each stream before anything counts
_QUIET = 48  # tokens of each stream before the long prompt comes
_LONG_PROMPT = 4_000
_SHARED = 1_000
_TAIL = 8
_TIMEOUT_S = 1800.0
_POLL_S = 0.005


@dataclass(slots=True)
class _Stream:
    """One stream of plain decoding, and when its tokens came."""

    session_id: str = ""
    times: list[float] = field(default_factory=list)
    thread: Future[None] = field(default_factory=Future)

    def follow(self, client: Client, prompt: Sequence[int], max_tokens: int) -> None:
        for reply in client.generate(tokens=prompt, params=_greedy(max_tokens), gamma=0):
            if isinstance(reply, Started):
                self.session_id = reply.session_id
            elif isinstance(reply, Tokens):
                self.times.append(time.perf_counter())

    def gaps(self, counts: Callable[[float, float], bool]) -> list[float]:
        return [1000 * (b - a) for a, b in pairwise(self.times) if counts(a, b)]


def measure(plan: LaunchPlan, extent: EngineExtent, say: Callable[[str], None]) -> Served:
    say("starting the services")
    with stack(plan) as running, Client(running.endpoints, timeout_s=_TIMEOUT_S) as client:
        model = client.model()
        say("prompts that begin alike")
        first, second = _first_tokens(client, extent.prompts, model.vocab_size, model.context_length)
        quiet: list[float] = []
        during: list[float] = []
        for number in range(extent.prefills):
            say(f"a long prompt beside {_STREAMS} streams, {number + 1} of {extent.prefills}")
            without, beside = _gaps(client, number, model.vocab_size, model.context_length)
            quiet += without
            during += beside
    return Served(Times(quiet), Times(during), first, second)


def _first_tokens(client: Client, prompts: int, vocab_size: int, context_length: int) -> tuple[Times, Times]:
    """Pairs of prompts that differ in their last tokens only, one after the other; the first pair is not counted."""
    shared = min(_SHARED, context_length - _TAIL - 1)
    waits: dict[str, list[float]] = {"first": [], "second": []}
    for number in range(prompts + 1):
        beginning = some_tokens(f"shared {number}", shared, vocab_size)
        for name, taken in waits.items():
            asked, came = _first_token(client, beginning + some_tokens(f"{name} {number}", _TAIL, vocab_size))
            if number:
                taken.append(1000 * (came - asked))
    return Times(waits["first"]), Times(waits["second"])


def _gaps(client: Client, number: int, vocab_size: int, context_length: int) -> tuple[list[float], list[float]]:
    """Milliseconds between tokens of running streams, first undisturbed, then while a long prompt is cached."""
    room = min(_STREAM_TOKENS, context_length - _STREAM_PROMPT)
    long_prompt = some_tokens(f"long {number}", min(_LONG_PROMPT, context_length - 1), vocab_size)
    streams = [_Stream() for _ in range(_STREAMS)]
    with ThreadPoolExecutor(_STREAMS) as threads:
        for i, stream in enumerate(streams):
            prompt = some_tokens(f"stream {number} {i}", _STREAM_PROMPT, vocab_size)
            stream.thread = threads.submit(stream.follow, client, prompt, room)
        try:
            _until(streams, lambda stream: len(stream.times) >= _SETTLING)
            settled = time.perf_counter()
            _until(streams, lambda stream: len(stream.times) >= _SETTLING + _QUIET)
            asked, came = _first_token(client, long_prompt)
            _until(streams, lambda stream: stream.times[-1] > came)
        finally:
            for stream in streams:
                if not stream.thread.done():
                    client.cancel(stream.session_id)
    for stream in streams:
        stream.thread.result()
    quiet = [gap for stream in streams for gap in stream.gaps(lambda a, b: a > settled and b < asked)]
    during = [gap for stream in streams for gap in stream.gaps(lambda a, b: b > asked and a < came)]
    return quiet, during


def _until(streams: list[_Stream], reached: Callable[[_Stream], bool]) -> None:
    """Of every stream that has not come to its end; raises what broke one."""
    while not all(stream.thread.done() or reached(stream) for stream in streams):
        time.sleep(_POLL_S)
    for stream in streams:
        if stream.thread.done():
            stream.thread.result()


def _first_token(client: Client, prompt: Sequence[int]) -> tuple[float, float]:
    """When it was asked for and when it came."""
    asked = time.perf_counter()
    came = [
        time.perf_counter()
        for reply in client.generate(tokens=prompt, params=_greedy(1), gamma=0)
        if not isinstance(reply, Started)
    ]
    return asked, came[0]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
