"""The common part of all engines over a paged cache: block tables, and the inputs of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from outrider.engine.block_manager import BLOCK_TOKENS, BlockManager, blocks_for
from outrider.engine.checks.arithmetic import combine, torch_arithmetic
from outrider.engine.interface import SessionTokens, StepResult
from outrider.protocol.fleet import ModelInfo


@dataclass(slots=True)
class Segment:
    """One session's share of a step."""

    start: int  # index of its first token in the step
    new: SessionTokens
    base: int  # number of tokens cached before
    blocks: Sequence[int]

    @property
    def count(self) -> int:
        """Return the number of new tokens."""
        return len(self.new.tokens)

    @property
    def end(self) -> int:
        """Return the index after its last token in the step."""
        return self.start + self.count

    def tree_mask(self) -> torch.Tensor:
        """Return which new tokens each new token attends to: itself and its ancestors.  # [tokens, tokens]"""
        if not self.new.parents:
            return torch.ones((self.count, self.count), dtype=torch.bool).tril()
        mask = torch.eye(self.count, dtype=torch.bool)
        for index, parent in enumerate(self.new.parents):
            if parent >= 0:
                mask[index] |= mask[parent]
        return mask


@dataclass(slots=True)
class ForwardStep:
    """The inputs of one forward pass over all sessions."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # indices of the tokens with an output, see `output_indices`
    counts: list[int] = field(default_factory=list)  # number of logits per segment
    segments: list[Segment] = field(default_factory=list)
    input_embeddings: torch.Tensor | None = None  # [tokens, width], in place of embeddings

    @property
    def num_logits(self) -> int:
        """Return how many of `outputs`, from the first, need logits; the others need hidden states only."""
        return sum(self.counts)


def output_indices(segments: Sequence[Segment], first_of: Mapping[int, int]) -> list[int]:
    """Return the indices of all tokens that need logits, then of those that need hidden states only.

    `first_of` maps each segment's start to the index of its first token.
    """
    logits: list[int] = []
    hidden: list[int] = []
    for segment in segments:
        new, first = segment.new, first_of[segment.start]
        logits += range(first + new.logits_from, first + segment.count)
        if new.hidden_from is not None:
            hidden += range(first + new.hidden_from, first + new.logits_from)
    return logits + hidden


class PagedEngine(ABC):
    """Base of the engines over a paged cache.

    Sessions come and go between any two steps. A rollback drops tokens from the block table, whatever the context.
    """

    def __init__(
        self, info: ModelInfo, device: torch.device, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        self._info = info
        self._device = device
        max_evictable = None if evictable_tokens is None else blocks_for(evictable_tokens)
        self._blocks = BlockManager(blocks_for(kv_tokens), max_evictable)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def arithmetic(self) -> str:
        """Return the name of the arithmetic: equal names mean equal bits on every machine."""
        return torch_arithmetic(type(self).__name__, self._device)

    def sign_fingerprint(self, ranks: int = 1) -> Self:
        """Add the arithmetic to the model's fingerprint, so that no verifier with another one continues a session.

        `ranks` is the number of processes that share the model.
        """
        arithmetic = self.arithmetic if ranks == 1 else f"{self.arithmetic}, {ranks} ranks"
        self._info = replace(self._info, fingerprint=combine(self._info.fingerprint, arithmetic))
        return self

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def capacity_tokens(self) -> int:
        return self._blocks.num_blocks * BLOCK_TOKENS

    @property
    def cached_tokens(self) -> int:
        return self._blocks.blocks_in_use * BLOCK_TOKENS

    @property
    def evictable_tokens(self) -> int:
        return self._blocks.evictable_blocks * BLOCK_TOKENS

    def length(self, session: str) -> int:
        table = self._blocks.table(session)
        return len(table.tokens) if table else 0

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return self._blocks.match_prefix(session, tokens, salt)

    @torch.inference_mode()
    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        step = self._prepare(batch)
        logits, hidden = self._run(step)
        logits = logits[: step.num_logits]
        for new in batch:
            self._blocks.append(new.session, new.tokens, branching=bool(new.parents))
        return StepResult(
            logits,
            list(torch.split(logits, step.counts)),
            list(_hidden_states(step, hidden)),
        )

    def _prepare(self, batch: Sequence[SessionTokens]) -> ForwardStep:
        """Allocate blocks and return the inputs of the forward pass."""
        step = ForwardStep()
        for new in batch:
            base = self.length(new.session)
            copies = self._blocks.allocate(new.session, len(new.tokens))
            if copies:
                self._copy_blocks(copies)
            table = self._blocks.table(new.session)
            assert table is not None
            segment = Segment(len(step.ids), new, base, table.blocks)
            step.ids += new.tokens
            step.positions += [base + depth for depth in new.depths()]
            step.counts.append(segment.count - new.logits_from)
            step.segments.append(segment)
        step.outputs = output_indices(step.segments, {segment.start: segment.start for segment in step.segments})
        if batch and batch[0].input_embeddings is not None:
            step.input_embeddings = torch.cat(
                [new.input_embeddings for new in batch if new.input_embeddings is not None]
            )
        return step

    def truncate(self, session: str, length: int) -> None:
        self._blocks.truncate(session, length)

    @torch.inference_mode()
    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        table = self._blocks.table(session)
        assert table is not None
        moved = [(base + index, base + i) for i, index in enumerate(indices) if index != i]
        if moved:
            self._move(
                [slot_of(table.blocks, old) for old, _ in moved], [slot_of(table.blocks, new) for _, new in moved]
            )
        self._blocks.compact(session, base, indices)

    def fork(self, session: str, copy: str) -> None:
        self._blocks.fork(session, copy)

    def free(self, session: str) -> None:
        self._blocks.free(session)

    def evict_all(self) -> None:
        """Drop all cached blocks of ended sessions."""
        self._blocks.evict_all()

    @abstractmethod
    def _run(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of all tokens into their blocks. Return logits of at least the first `num_logits`
        outputs, and final hidden states of all outputs."""

    @abstractmethod
    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _move(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Move keys and values from slots to slots; a slot is block · BLOCK_TOKENS + offset.

        All are read before any is written.
        """


def _hidden_states(step: ForwardStep, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the requested hidden states of each segment, in the order of its tokens."""
    with_logits, only = 0, step.num_logits
    for segment, count in zip(step.segments, step.counts, strict=True):
        first = segment.new.hidden_from
        if first is None:
            yield hidden[:0]
        else:
            before = max(0, segment.new.logits_from - first)
            after = hidden[with_logits + max(0, first - segment.new.logits_from) : with_logits + count]
            yield torch.cat([hidden[only : only + before], after]) if before else after
            only += before
        with_logits += count


def slot_of(blocks: Sequence[int], index: int) -> int:
    """Return the slot of a session's token."""
    return blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
