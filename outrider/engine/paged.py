"""What all engines over a paged cache share: whose tokens lie where, and what a step looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.engine.interface import Rows, StepResult
from outrider.engine.pages import PAGE_TOKENS, PageBook, pages_for
from outrider.messages import ModelInfo


@dataclass(slots=True)
class Segment:
    """One session's share of a step."""

    start: int  # first of its rows in the step
    rows: Rows
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
class Step:
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows whose logits are asked for
    counts: list[int] = field(default_factory=list)  # how many of them per segment
    segments: list[Segment] = field(default_factory=list)


class PagedEngine(ABC):
    """Sessions come and go between any two steps; rolling back is forgetting tokens, whatever the context."""

    def __init__(self, info: ModelInfo, device: torch.device, kv_tokens: int, idle_tokens: int | None = None) -> None:
        self._info = info
        self._device = device
        self._book = PageBook(pages_for(kv_tokens), None if idle_tokens is None else pages_for(idle_tokens))

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def capacity_tokens(self) -> int:
        return self._book.num_pages * PAGE_TOKENS

    @property
    def cached_tokens(self) -> int:
        return self._book.pages_in_use * PAGE_TOKENS

    @property
    def idle_tokens(self) -> int:
        return self._book.pages_idle * PAGE_TOKENS

    def length(self, session: str) -> int:
        held = self._book.held(session)
        return len(held.tokens) if held else 0

    def adopt(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return self._book.adopt(session, tokens, salt)

    @torch.inference_mode()
    def extend(self, batch: Sequence[Rows], *, features: bool = False) -> StepResult:
        step = Step()
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
            step.wanted += range(segment.start + rows.logits_from, segment.end)
            step.counts.append(segment.count - rows.logits_from)
            step.segments.append(segment)
        logits, hidden = self._run(step)
        for rows in batch:
            self._book.add(rows.session, rows.tokens, branching=bool(rows.parents))
        return StepResult(
            logits,
            list(torch.split(logits, step.counts)),
            list(torch.split(hidden, step.counts)) if features else None,
        )

    def truncate(self, session: str, length: int) -> None:
        self._book.truncate(session, length)

    @torch.inference_mode()
    def keep(self, session: str, base: int, rows: Sequence[int]) -> None:
        held = self._book.held(session)
        assert held is not None
        moved = [(base + row, base + i) for i, row in enumerate(rows) if row != i]
        if moved:
            self._move([slot_of(held.pages, old) for old, _ in moved], [slot_of(held.pages, new) for _, new in moved])
        self._book.keep(session, base, rows)

    def fork(self, session: str, copy: str) -> None:
        self._book.fork(session, copy)

    def free(self, session: str) -> None:
        self._book.free(session)

    def forget_idle(self) -> None:
        """Offer nothing of ended sessions any more."""
        self._book.forget_idle()

    @abstractmethod
    def _run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and final hidden states of the wanted rows; keys and values of all rows into their pages."""

    @abstractmethod
    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Keys and values from slots to slots; a slot is page · PAGE_TOKENS + offset. All are read before any is
        written."""


def slot_of(pages: Sequence[int], index: int) -> int:
    return pages[index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS
