"""The base of all engines over a paged cache: sessions in blocks, and one step after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.paged.arithmetic import torch_arithmetic
from outrider.engine.paged.block_manager import BLOCK_TOKENS, BlockManager, blocks_for
from outrider.engine.paged.step import ForwardStep, Segment, slot_of
from outrider.protocol.fleet import ModelInfo


class PagedEngine(ABC):
    """Base of the engines over a paged cache. Sessions come and go between steps; a rollback drops their tokens."""

    state_shape = (0, 0)  # decoder layers that it captures states of, and their width
    in_integers = False  # some products round their rows
    exact = False  # those are computed in float32 meanwhile

    def __init__(
        self, info: ModelInfo, device: torch.device, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        self.info = info
        self.device = device
        max_evictable = None if evictable_tokens is None else blocks_for(evictable_tokens)
        self.blocks = BlockManager(blocks_for(kv_tokens), max_evictable)
        self.capacity_tokens = self.blocks.pool.num_blocks * BLOCK_TOKENS
        # These move no keys and values.
        self.match_prefix, self.truncate, self.free = self.blocks.match_prefix, self.blocks.truncate, self.blocks.free

    @property
    def arithmetic(self) -> str:
        """Return the name of the arithmetic: equal names mean equal bits on every machine."""
        return torch_arithmetic(type(self).__name__, self.device)

    @property
    def evictable_tokens(self) -> int:
        return self.blocks.pool.num_evictable * BLOCK_TOKENS

    def length(self, session: str) -> int:
        table = self.blocks.tables.get(session)
        return len(table.tokens) if table else 0

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        step = self._schedule(batch)
        logits, hidden = self._run(step)
        for new in batch:
            self.blocks.append(new.session, new.tokens, branching=bool(new.parents))
        return step.result(logits, hidden)

    def _schedule(self, batch: Sequence[SessionTokens]) -> ForwardStep:
        """Allocate blocks for the new tokens, and return the inputs of the forward pass."""
        segments: list[Segment] = []
        start = 0
        for new in batch:
            if copy := self.blocks.allocate(new.session, len(new.tokens)):
                with torch.inference_mode():
                    self._copy(*(range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in copy))
            table = self.blocks.tables[new.session]
            segments.append(Segment.of(start, new, len(table.tokens), table.blocks))
            start += len(new.tokens)
        embeddings = [new.input_embeddings for new in batch if new.input_embeddings is not None]
        return ForwardStep.of(segments, embeddings, [layer for new in batch for layer in new.layers])

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        blocks = self.blocks.tables[session].blocks
        moved = [(base + index, base + i) for i, index in enumerate(indices) if index != i]
        if moved:
            with torch.inference_mode():
                self._copy([slot_of(blocks, old) for old, _ in moved], [slot_of(blocks, new) for _, new in moved])
        self.blocks.compact(session, base, indices)

    @abstractmethod
    def _run(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of all tokens into their blocks. Return logits of at least the first `num_logits`
        outputs, and hidden states of all outputs: the final ones, and behind them those after `step.layers`."""

    @abstractmethod
    def _copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Copy keys and values between slots, block · BLOCK_TOKENS + offset; all are read before any is written."""
