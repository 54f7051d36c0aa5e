"""The inputs of a step on a CUDA device: laid out on the host, sent in one copy, read by kernels.

Few new tokens of a session attend in ranges of its context, one program for each, whose results are joined. The ranges
have fixed places, so what a token's sum is made of does not depend on the step. Many new tokens, of a prompt, attend to
all of their context at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.engine.paged.step import ForwardStep

FEW_TOKENS = 64  # of a session, up to which they attend in ranges
_LONGEST = 31  # a text has fewer than two to this power tokens
# Ranges of 128 tokens up to 2,048, then eight for each power of two.
_RANGES = np.array(
    [*range(0, 2048, 128), *(start for k in range(11, _LONGEST) for start in range(1 << k, 2 << k, 1 << (k - 3)))]
)

# Numbers that a field is a multiple of: Triton compiles a kernel anew for pointers that are aligned otherwise.
_ALIGNED = 16

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """The tokens of a session that a program attends from: `rows`, with all heads of a key head, in `lanes`."""

    rows: int
    lanes: int

    @classmethod
    def of(cls, group: int, lanes: int) -> QueryBlock:
        """Return the block of about so many lanes for `group` heads of each key head."""
        lanes = max(lanes, 1 << (group - 1).bit_length())
        return cls(lanes // group, lanes)


@dataclass(frozen=True, slots=True)
class InputSizes:
    """The numbers of what a step has, or may have."""

    tokens: int
    items: int  # ranges of a block of few tokens
    whole_items: int  # blocks of many tokens
    parts: int  # sums of a token over a range
    pages: int
    links: int  # entries of trees' masks

    def fit(self, limits: InputSizes) -> bool:
        """Return whether inputs of these sizes fit into others."""
        return all(getattr(self, each.name) <= getattr(limits, each.name) for each in fields(self))


class StepLayout:
    """The inputs of a step as arrays of the host."""

    def __init__(self, step: ForwardStep, blocks: Sequence[QueryBlock]) -> None:
        segments = step.segments
        counts = np.array([segment.count for segment in segments])
        bases = np.array([segment.base for segment in segments])
        pages = np.array([len(segment.blocks) for segment in segments])
        self.pages = np.array(list(chain.from_iterable(segment.blocks for segment in segments)))
        first_page = _before(pages)
        of = np.repeat(np.arange(len(segments)), counts)  # each token's segment
        index = bases[of] + np.arange(len(of)) - _before(counts)[of]  # not `_within`, which takes longer
        slots = self.pages[first_page[of] + index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
        self.tokens, self.outputs = np.array([step.ids, step.positions, slots]), np.array(step.outputs, np.int64)
        masks = [segment.mask for segment in segments]
        links = [np.zeros(0, bool) if mask is None else mask.numpy().ravel() for mask in masks]
        self.links = np.concatenate(links)
        tree = np.array([mask is not None for mask in masks])
        first_link = np.where(tree, _before(np.array([len(each) for each in links])), -1)

        many = counts > FEW_TOKENS
        rows = np.where(many, blocks[True].rows, blocks[False].rows)
        of = np.repeat(np.arange(len(segments)), -(-counts // rows))  # each query block's segment
        first = _within(of) * rows[of]  # of its tokens, in the segment
        live = np.minimum(rows[of], counts[of] - first)  # number of its tokens
        columns = (_before(counts)[of] + first, first, live, bases[of], counts[of], first_page[of], first_link[of])
        self.lanes = np.stack((*columns, live), axis=1)
        ends = bases[of] + np.where(tree[of], counts[of], first + live)  # of the context that it reads
        ranges = np.where(many[of], 0, np.searchsorted(_RANGES, ends))  # number of those that it reads
        first_part = _before(ranges * live)
        block = np.repeat(np.arange(len(of)), ranges)  # each item's query block
        which = _within(block)
        highs = np.minimum(np.append(_RANGES, 1 << _LONGEST)[which + 1], ends[block])
        self.items = np.stack((block, _RANGES[which], highs, first_part[block] + which * live[block]), axis=1)
        block = np.flatnonzero(many[of])
        self.whole_items = np.stack((block, 0 * block, ends[block], block), axis=1)
        block = np.repeat(np.arange(len(of)), live)  # each token's query block
        self.joins = np.stack((first_part[block] + _within(block), live[block], ranges[block]), axis=1)
        self.sizes = InputSizes(
            len(step.ids),
            len(self.items),
            len(self.whole_items),
            int((ranges * live).sum()),
            len(self.pages),
            len(self.links),
        )


class StepInputs:
    """The inputs of steps up to some sizes, on the device."""

    def __init__(
        self, sizes: InputSizes, blocks: Sequence[QueryBlock], heads: int, dim: int, scratch: int, device: torch.device
    ) -> None:
        self.sizes, self.blocks, self._scratch, self._device = sizes, blocks, scratch, device
        tokens = _aligned(sizes.tokens)
        shapes: list[tuple[int, ...]] = [(4, tokens), (_ALIGNED,), (tokens, 8), (tokens, 3), (_aligned(sizes.pages),)]
        shapes += [(_aligned(sizes.whole_items), 4), (_aligned(-(-sizes.links // 8)),), (_aligned(sizes.items), 4)]
        self._ends = list(accumulate(map(math.prod, shapes), initial=0))
        pinned = device.type == "cuda"
        self._host = torch.zeros(self._ends[-1], dtype=torch.int64, pin_memory=pinned)
        self._inputs = torch.zeros(self._ends[-1], dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        here, there = (
            [whole[first:].as_strided(shape, (*shape[1:], 1)) for first, shape in zip(self._ends, shapes, strict=False)]
            for whole in (self._host, self._inputs)
        )
        self._fields = [each.numpy() for each in here]
        token_fields, self.num_items, self.lanes, self.joins, self.pages, whole_items, links, items = there
        self.ids, self.positions, self.slots, self.outputs = token_fields
        self.links, self.items = links.view(torch.uint8), items[: sizes.items]
        self.whole_items = whole_items[: sizes.whole_items]
        self.parts = torch.empty((sizes.parts, heads, dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((sizes.parts, heads, 3), dtype=torch.float32, device=device)

    def send(self, layout: StepLayout | None) -> None:
        """Copy a step's inputs to the device; None: of no token, so that only padding is computed."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy must have read the host memory
        tokens, num_items, lanes, joins, pages, whole_items, links, items = self._fields
        tokens[:] = [[0], [0], [self._scratch * BLOCK_TOKENS], [0]]
        joins[:] = num_items[:] = 0
        end = self._ends[-2]
        if layout is not None:
            sizes = layout.sizes
            tokens[:3, : sizes.tokens] = layout.tokens
            tokens[3, : len(layout.outputs)] = layout.outputs
            num_items[:2] = sizes.items, sizes.whole_items
            joins[: sizes.tokens] = layout.joins
            lanes[: len(layout.lanes)] = layout.lanes
            pages[: sizes.pages] = layout.pages
            whole_items[: sizes.whole_items] = layout.whole_items
            links.view(bool)[: sizes.links] = layout.links
            items[: sizes.items] = layout.items
            end += layout.items.size
        self._inputs[:end].copy_(self._host[:end], non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _before(counts: Array) -> Array:
    """Return the sum of the counts before each."""
    return np.cumsum(counts) - counts


def _within(of: Array) -> Array:
    """Return the place of each element among those of the same value, which follow each other."""
    return np.arange(len(of)) - np.searchsorted(of, of)
