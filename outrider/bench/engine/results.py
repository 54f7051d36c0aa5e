"""What `outrider bench engine` measures and what follows from it. Knows no torch: tables and plots need none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bench.common.report import Row, Times

BASE_CONTEXT = 256  # where ratios between steps are taken
MOST_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineExtent:
    """How much is measured."""

    rounds: int
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    sessions: tuple[int, ...]
    batch_tokens: int  # context of all sessions of a step together, at most
    prefills: int  # long prompts beside running streams
    prompts: int  # beginnings that two sessions share

    def sessions_at(self, context: int) -> tuple[int, ...]:
        """One session more than fits is left out: long contexts get fewer."""
        return tuple(count for count in self.sessions if count * context <= self.batch_tokens)

    def contexts_of(self, context_length: int) -> tuple[int, ...]:
        """Those that a model with this context has room for."""
        return tuple(context for context in self.contexts if context + MOST_NEW_TOKENS <= context_length)

    @property
    def kv_tokens(self) -> int:
        """Cache for the largest of these steps."""
        return max(self.sessions_at(context)[-1] * (context + 2 * MOST_NEW_TOKENS) for context in self.contexts)


@dataclass(frozen=True, slots=True)
class Alone:
    """Forward passes of an engine that nobody else uses, in this process."""

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
        return self.read_bytes / self.read.least / 1e6

    @property
    def matmul_gflop_s(self) -> float:
        return self.product_flop / self.product.least / 1e6

    @property
    def floor_ms(self) -> float:
        """One token cannot take less: what it reads has to come from memory."""
        return self.token_bytes / self.bandwidth_gb_s / 1e6

    def tokens_per_s(self, context: int, sessions: int) -> float:
        return 1000 * sessions / self.batch[context, sessions].least

    def contexts(self) -> list[int]:
        return sorted({context for context, _ in self.verification})


@dataclass(frozen=True, slots=True)
class Served:
    """The same model behind the real services."""

    quiet: Times  # between tokens of a stream
    during: Times  # while a long prompt is cached
    first: Times  # to the first token
    second: Times  # of a session that begins like one before


def summary(alone: Alone, served: Served) -> dict[str, Any]:
    """Ratios of steps are of minima: whatever else the machine does only ever adds."""

    def flatness(new_tokens: int) -> float:
        return alone.verification[BASE_CONTEXT, new_tokens].least / alone.single.least

    def together(sessions: int) -> float:
        return alone.tokens_per_s(BASE_CONTEXT, sessions) / alone.tokens_per_s(BASE_CONTEXT, 1)

    return {
        "single_token_vs_eager": alone.single.least / alone.eager.least,
        "flatness_9": flatness(9),
        "flatness_17": flatness(17),
        "sessions8_vs_1": together(8),
        "sessions32_vs_1": together(32),
        "prefill_gap_ratio": served.during.p99 / served.quiet.median,
        "prefix_ttft_ratio": served.second.median / served.first.median,
        "fraction_of_floor": alone.floor_ms / alone.single.least,
        "single_token_ms": alone.single.least,
        "eager_token_ms": alone.eager.least,
        "floor_ms": alone.floor_ms,
        "token_mb": alone.token_bytes / 1e6,
        "bandwidth_gb_s": alone.bandwidth_gb_s,
        "matmul_gflop_s": alone.matmul_gflop_s,
        "memory_mb": dict(alone.memory_mb),
    }


def rows(alone: Alone, served: Served) -> list[Row]:
    """Every measurement, one a row; `part` says of what."""
    verification = [
        {"part": "verification", "context": context, "new_tokens": new} | times.row()
        for (context, new), times in _in_order(alone.verification)
    ]
    batch = [
        {"part": "batch", "context": context, "sessions": sessions}
        | times.row()
        | {"tokens_per_s": alone.tokens_per_s(context, sessions)}
        for (context, sessions), times in _in_order(alone.batch)
    ]
    single = [
        {"part": "single_token", "name": name, "context": BASE_CONTEXT} | times.row()
        for name, times in (("outrider", alone.single), ("transformers", alone.eager))
    ]
    ceilings = [
        {"part": "ceiling", "name": "read"} | alone.read.row() | {"gb_s": alone.bandwidth_gb_s},
        {"part": "ceiling", "name": "matmul"} | alone.product.row() | {"gflop_s": alone.matmul_gflop_s},
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


def _in_order(measured: Mapping[tuple[int, int], Times]) -> list[tuple[tuple[int, int], Times]]:
    return [(key, measured[key]) for key in sorted(measured)]


def some_tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    """A prompt that no other seed gives: nothing is shared with it by chance."""
    source = random.Random(seed)  # noqa: S311 - prompts, not secrets
    return [source.randrange(vocab_size) for _ in range(count)]
