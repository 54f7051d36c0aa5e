"""What all engines over a paged cache share: whose tokens lie where, and what a step looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from outrider.engine.block_manager import BLOCK_TOKENS, BlockManager, blocks_for
from outrider.engine.checks.arithmetic import of_torch, signed
from outrider.engine.interface import SessionTokens, StepResult
from outrider.protocol.fleet import ModelInfo


@dataclass(slots=True)
class Segment:
    """One session's share of a step."""

    start: int  # first of its rows in the step
    rows: SessionTokens
    base: int  # tokens cached before
    pages: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.rows.tokens)

    @property
    def end(self) -> int:
        return self.start + self.count

    def sees(self) -> torch.Tensor:
        """Which new rows each new row sees.  # [rows, rows]"""
        if not self.rows.parents:
            return torch.ones((self.count, self.count), dtype=torch.bool).tril()
        among = torch.eye(self.count, dtype=torch.bool)
        for row, parent in enumerate(self.rows.parents):
            if parent >= 0:
                among[row] |= among[parent]
        return among


@dataclass(slots=True)
class ForwardStep:
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows that are asked for, see `wanted_rows`
    counts: list[int] = field(default_factory=list)  # per segment, how many logits
    segments: list[Segment] = field(default_factory=list)
    inputs: torch.Tensor | None = None  # [rows, width], in place of embeddings

    @property
    def num_logits(self) -> int:
        """How many of `wanted`, from the first, are asked for their logits; the others for their hidden state only."""
        return sum(self.counts)


def wanted_rows(segments: Sequence[Segment], at: Mapping[int, int]) -> list[int]:
    """All rows whose logits are asked for, then those of which only the hidden state is. `at`: where each segment's
    rows were put, by its start."""
    logits: list[int] = []
    hidden: list[int] = []
    for segment in segments:
        rows, first = segment.rows, at[segment.start]
        logits += range(first + rows.logits_from, first + segment.count)
        if rows.hidden_from is not None:
            hidden += range(first + rows.hidden_from, first + rows.logits_from)
    return logits + hidden


class PagedEngine(ABC):
    """Sessions come and go between any two steps; rolling back is forgetting tokens, whatever the context."""

    def __init__(
        self, info: ModelInfo, device: torch.device, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        self._info = info
        self._device = device
        self._book = BlockManager(
            blocks_for(kv_tokens), None if evictable_tokens is None else blocks_for(evictable_tokens)
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def arithmetic(self) -> str:
        """Equal names, equal bits, on whatever machine."""
        return of_torch(type(self).__name__, self._device)

    def signed(self, ranks: int = 1) -> Self:
        """Put the arithmetic into the model's fingerprint: an unlike verifier must not go on with a session of this
        one. `ranks` share the model."""
        arithmetic = self.arithmetic if ranks == 1 else f"{self.arithmetic}, {ranks} ranks"
        self._info = replace(self._info, fingerprint=signed(self._info.fingerprint, arithmetic))
        return self

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def capacity_tokens(self) -> int:
        return self._book.num_blocks * BLOCK_TOKENS

    @property
    def cached_tokens(self) -> int:
        return self._book.blocks_in_use * BLOCK_TOKENS

    @property
    def evictable_tokens(self) -> int:
        return self._book.evictable_blocks * BLOCK_TOKENS

    def length(self, session: str) -> int:
        held = self._book.held(session)
        return len(held.tokens) if held else 0

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return self._book.match_prefix(session, tokens, salt)

    @torch.inference_mode()
    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        step = ForwardStep()
        for rows in batch:
            base = self.length(rows.session)
            copies = self._book.room(rows.session, len(rows.tokens))
            if copies:
                self._copy_pages(copies)
            held = self._book.held(rows.session)
            assert held is not None
            segment = Segment(len(step.ids), rows, base, held.pages)
            step.ids += rows.tokens
            step.positions += [base + depth for depth in rows.depths()]
            step.counts.append(segment.count - rows.logits_from)
            step.segments.append(segment)
        step.wanted = wanted_rows(step.segments, {segment.start: segment.start for segment in step.segments})
        if batch and batch[0].inputs is not None:
            step.inputs = torch.cat([rows.inputs for rows in batch if rows.inputs is not None])
        logits, hidden = self._run(step)
        logits = logits[: step.num_logits]
        for rows in batch:
            self._book.add(rows.session, rows.tokens, branching=bool(rows.parents))
        return StepResult(
            logits,
            list(torch.split(logits, step.counts)),
            list(_hidden_states(step, hidden)),
        )

    def truncate(self, session: str, length: int) -> None:
        self._book.truncate(session, length)

    @torch.inference_mode()
    def compact(self, session: str, base: int, rows: Sequence[int]) -> None:
        held = self._book.held(session)
        assert held is not None
        moved = [(base + row, base + i) for i, row in enumerate(rows) if row != i]
        if moved:
            self._move([slot_of(held.pages, old) for old, _ in moved], [slot_of(held.pages, new) for _, new in moved])
        self._book.compact(session, base, rows)

    def fork(self, session: str, copy: str) -> None:
        self._book.fork(session, copy)

    def free(self, session: str) -> None:
        self._book.free(session)

    def evict_all(self) -> None:
        """Offer nothing of ended sessions any more."""
        self._book.evict_all()

    @abstractmethod
    def _run(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states of the wanted rows and logits of at least the first `num_logits` of them; keys and
        values of all rows into their pages."""

    @abstractmethod
    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Keys and values from slots to slots; a slot is page · BLOCK_TOKENS + offset. All are read before any is
        written."""


def _hidden_states(step: ForwardStep, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Per segment what of the wanted rows' hidden states was asked for, in the order of its rows."""
    with_logits, only = 0, step.num_logits
    for segment, count in zip(step.segments, step.counts, strict=True):
        first = segment.rows.hidden_from
        if first is None:
            yield hidden[:0]
        else:
            before = max(0, segment.rows.logits_from - first)
            after = hidden[with_logits + max(0, first - segment.rows.logits_from) : with_logits + count]
            yield torch.cat([hidden[only : only + before], after]) if before else after
            only += before
        with_logits += count


def slot_of(pages: Sequence[int], index: int) -> int:
    return pages[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
