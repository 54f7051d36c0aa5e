"""The inputs of a step in a fixed shape, padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outrider.engine.cuda.decoder import SessionGroup
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.engine.paged.step import Segment, output_indices, slot_of

_MIN_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The capacity of a bucket."""

    sessions: int
    tokens: int  # new tokens of each session
    context: int  # tokens of each session, cached and new
    layers: tuple[int, ...] = ()  # after which states are captured

    @classmethod
    def of(cls, segments: Sequence[Segment], layers: tuple[int, ...] = ()) -> GraphShape:
        """Return the smallest shape that holds the segments."""
        tokens = _power_of_two(max(segment.count for segment in segments))
        context = _power_of_two(max(_MIN_CONTEXT, *(segment.base + tokens for segment in segments)))
        return cls(_power_of_two(len(segments)), tokens, context, layers)

    @property
    def all_tokens(self) -> int:
        """Return the number of new tokens of all sessions."""
        return self.sessions * self.tokens

    @property
    def blocks(self) -> int:
        """Return the number of blocks of each session."""
        return self.context // BLOCK_TOKENS


class PaddedInputs:
    """The inputs of a shape: filled on the host, sent in one copy, read on the device."""

    def __init__(self, shape: GraphShape, scratch: int, device: torch.device) -> None:
        self.shape = shape
        pinned = device.type == "cuda"
        size = sum(_sizes(shape))
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._device = device
        self._fields = _Fields.of(self._host, shape)
        self._inputs = _Fields.of(self._on_device, shape)
        self._fields.slots.fill_(scratch * BLOCK_TOKENS)
        self._fields.table.fill_(scratch)
        self._fields.mask.fill_(True).tril_()  # as in a chain
        self._empty = self._host.numpy().copy()
        self._whole = self._host.numpy()
        self._arrays = [field.numpy() for field in self._fields]

    @property
    def tokens(self) -> torch.Tensor:
        """Return ids, positions and slots.  # [3, tokens]"""
        return self._on_device[: 3 * self.shape.all_tokens].view(3, -1)

    @property
    def outputs(self) -> torch.Tensor:
        """Return the indices of the tokens with an output."""
        return self._inputs.outputs

    def group(self, first: int) -> SessionGroup:
        """Return the sessions as a group whose tokens begin at `first`."""
        shape, inputs = self.shape, self._inputs
        table = inputs.table.view(-1)
        return SessionGroup(first, shape.sessions, shape.tokens, table, inputs.base, inputs.positions, inputs.mask)

    def send(self, segments: Sequence[Segment]) -> None:
        """Fill in the inputs of these segments, and copy them to the device."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy must have read the host memory
        self._fill(segments)
        self._on_device.copy_(self._host, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))

    def _fill(self, segments: Sequence[Segment]) -> None:
        self._whole[:] = self._empty
        ids, positions, slots, outputs, base, table, mask = self._arrays
        for i, segment in enumerate(segments):
            count = segment.count
            ids[i, :count] = segment.tokens
            positions[i, :count] = segment.positions
            slots[i, :count] = [slot_of(segment.blocks, segment.base + index) for index in range(count)]
            base[i] = segment.base
            table[i, : len(segment.blocks)] = segment.blocks
            if segment.mask is not None:
                mask[i, :count, :count] = segment.mask.numpy()
        chosen = output_indices(segments, {segment.start: i * self.shape.tokens for i, segment in enumerate(segments)})
        outputs[: len(chosen)] = chosen


class _Fields(NamedTuple):
    """The parts of one tensor."""

    ids: torch.Tensor  # [sessions, tokens]
    positions: torch.Tensor  # [sessions, tokens]
    slots: torch.Tensor  # [sessions, tokens]
    outputs: torch.Tensor  # [sessions · tokens]
    base: torch.Tensor  # [sessions]
    table: torch.Tensor  # [sessions, blocks]
    mask: torch.Tensor  # [sessions, tokens, tokens]

    @classmethod
    def of(cls, whole: torch.Tensor, shape: GraphShape) -> _Fields:
        *tokens, outputs, base, table, mask = torch.split_with_sizes(whole, _sizes(shape))
        ids, positions, slots = (each.view(shape.sessions, shape.tokens) for each in tokens)
        square = mask.view(torch.bool)[: shape.all_tokens * shape.tokens]
        square = square.view(shape.sessions, shape.tokens, shape.tokens)
        return cls(ids, positions, slots, outputs, base, table.view(shape.sessions, -1), square)


def _sizes(shape: GraphShape) -> list[int]:
    """Return the sizes of the fields in units of 8 bytes; an entry of the mask takes one byte."""
    tokens = shape.all_tokens
    mask = -(-tokens * shape.tokens // 8)
    return [tokens, tokens, tokens, tokens, shape.sessions, shape.sessions * shape.blocks, mask]


def _power_of_two(least: int) -> int:
    """Return the next power of two."""
    return 1 << (least - 1).bit_length()
