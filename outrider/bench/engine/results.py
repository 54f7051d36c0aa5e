"""Figures of `outrider bench engine`, its rows and its summary. The module does not import torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bench.common.report import Row, Times

BASE_CONTEXT = 256  # context at which steps are compared
MOST_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineExtent:
    """Number of rounds and points to measure."""

    rounds: int
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    sessions: tuple[int, ...]
    batch_tokens: int  # limit for the context of all sessions of a step together
    prefills: int  # long prompts during running streams
    prompts: int  # prefixes that two sessions share

    def sessions_at(self, context: int) -> tuple[int, ...]:
        """Return the session counts that fit: long contexts get fewer."""
        return tuple(count for count in self.sessions if count * context <= self.batch_tokens)

    def contexts_of(self, context_length: int) -> tuple[int, ...]:
        """Return the contexts that fit into the model's context length."""
        return tuple(context for context in self.contexts if context + MOST_NEW_TOKENS <= context_length)

    @property
    def kv_tokens(self) -> int:
        """Return the KV cache slots that the largest step needs."""
        return max(self.sessions_at(context)[-1] * (context + 2 * MOST_NEW_TOKENS) for context in self.contexts)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of forward passes of an engine in this process, without other load."""

    name: str
    engine: str
    weights: str
    device: str
    threads: int
    verification: Mapping[tuple[int, int], Times]  # context, new tokens
    batch: Mapping[tuple[int, int], Times]  # context, sessions
    eager: Times
    read: Times
    read_bytes: int
    product: Times
    product_flop: int
    token_bytes: int  # read for one token: weights, and keys and values of the context
    memory_mb: Mapping[str, float]

    @property
    def single(self) -> Times:
        return self.verification[BASE_CONTEXT, 1]

    @property
    def bandwidth_gb_s(self) -> float:
        return self.read_bytes / self.read.best / 1e6

    @property
    def matmul_gflop_s(self) -> float:
        return self.product_flop / self.product.best / 1e6

    @property
    def floor_ms(self) -> float:
        """Return the lower bound for one token: the time to read its bytes from memory."""
        return self.token_bytes / self.bandwidth_gb_s / 1e6

    def tokens_per_s(self, context: int, sessions: int) -> float:
        return 1000 * sessions / self.batch[context, sessions].best

    def contexts(self) -> list[int]:
        return sorted({context for context, _ in self.verification})


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """Times of the same model behind the real services."""

    quiet: Times  # between tokens of undisturbed streams
    during: Times  # between tokens, during a long prefill
    first: Times  # to the first token
    second: Times  # to the first token of a session whose prefix is cached


def summary(passes: PassTimes, served: ServedTimes) -> dict[str, Any]:
    """Return the summary. Steps are compared by their minima: other load on the machine only adds time."""

    def flatness(new_tokens: int) -> float:
        return passes.verification[BASE_CONTEXT, new_tokens].best / passes.single.best

    def speedup(sessions: int) -> float:
        return passes.tokens_per_s(BASE_CONTEXT, sessions) / passes.tokens_per_s(BASE_CONTEXT, 1)

    return {
        "single_token_vs_eager": passes.single.best / passes.eager.best,
        "flatness_9": flatness(9),
        "flatness_17": flatness(17),
        "sessions8_vs_1": speedup(8),
        "sessions32_vs_1": speedup(32),
        "prefill_gap_ratio": served.during.p99 / served.quiet.median,
        "prefix_ttft_ratio": served.second.median / served.first.median,
        "fraction_of_floor": passes.floor_ms / passes.single.best,
        "single_token_ms": passes.single.best,
        "eager_token_ms": passes.eager.best,
        "floor_ms": passes.floor_ms,
        "token_mb": passes.token_bytes / 1e6,
        "bandwidth_gb_s": passes.bandwidth_gb_s,
        "matmul_gflop_s": passes.matmul_gflop_s,
        "memory_mb": dict(passes.memory_mb),
    }


def rows(passes: PassTimes, served: ServedTimes) -> list[Row]:
    """Return one row per measurement; `part` names its kind."""
    verification = [
        {"part": "verification", "context": context, "new_tokens": new} | times.row()
        for (context, new), times in sorted(passes.verification.items())
    ]
    batch = [
        {"part": "batch", "context": context, "sessions": sessions}
        | times.row()
        | {"tokens_per_s": passes.tokens_per_s(context, sessions)}
        for (context, sessions), times in sorted(passes.batch.items())
    ]
    single = [
        {"part": "single_token", "name": name, "context": BASE_CONTEXT} | times.row()
        for name, times in (("outrider", passes.single), ("transformers", passes.eager))
    ]
    ceilings = [
        {"part": "ceiling", "name": "read"} | passes.read.row() | {"gb_s": passes.bandwidth_gb_s},
        {"part": "ceiling", "name": "matmul"} | passes.product.row() | {"gflop_s": passes.matmul_gflop_s},
    ]
    streams = [
        {"part": part, "name": name} | times.row() | {"p99_ms": times.p99}
        for part, name, times in (
            ("prefill_gap", "without", served.quiet),
            ("prefill_gap", "during", served.during),
            ("prefix_ttft", "first", served.first),
            ("prefix_ttft", "second", served.second),
        )
    ]
    return [*verification, *batch, *single, *ceilings, *streams]


def some_tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    """Return random tokens. Different seeds share no prefix by chance."""
    source = random.Random(seed)  # noqa: S311 - prompts, not secrets
    return [source.randrange(vocab_size) for _ in range(count)]
