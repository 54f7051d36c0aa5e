"""The base of all engines over a paged cache: sessions in blocks, and one step after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch

from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.paged.arithmetic import combine, torch_arithmetic
from outrider.engine.paged.block_manager import BLOCK_TOKENS, BlockManager, blocks_for
from outrider.engine.paged.step import ForwardStep, Segment, hidden_states_of, output_indices, slot_of
from outrider.protocol.fleet import ModelInfo


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
            list(hidden_states_of(step, hidden)),
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
