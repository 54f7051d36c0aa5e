"""The inputs of a step: what attends to what, joined from which parts, at aligned places."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.cuda.step_inputs import InputSizes, QueryBlock, StepInputs, StepLayout
from outrider.engine.interface import SessionTokens
from outrider.engine.paged.block_manager import blocks_for
from outrider.engine.paged.step import ForwardStep, Segment

BLOCKS = [QueryBlock.of(4, 16), QueryBlock.of(4, 64)]
ENTRY = 16  # bytes: Triton compiles a kernel again for a pointer that is not aligned to so many


def layout_of(*sessions: tuple[int, int]) -> StepLayout:
    """Return the layout of sessions with so many cached and new tokens."""
    segments, start, block = [], 0, 0
    for base, count in sessions:
        blocks = list(range(block, block + blocks_for(base + count)))
        segments.append(Segment.of(start, SessionTokens("s", [1] * count), base, blocks))
        start, block = start + count, block + len(blocks)
    return StepLayout(ForwardStep.of(segments, [], []), BLOCKS)


@pytest.mark.parametrize("context", [1, 127, 128, 129, 2047, 2048, 2049, 5000, 70_001])
def test_the_ranges_of_a_token_cover_its_context_once(context: int) -> None:
    layout = layout_of((context - 1, 1))
    lows, highs = layout.items[:, 1].tolist(), layout.items[:, 2].tolist()
    assert lows == [0, *highs[:-1]]
    assert highs[-1] == context
    assert all(low % 128 == 0 for low in lows)
    longer = layout_of((context + 5000, 1))
    assert longer.items[: len(lows), 1].tolist() == lows, "a range begins at the same place in every context"


def test_every_token_joins_parts_of_its_own() -> None:
    layout = layout_of((0, 1), (300, 9), (100, 80), (2100, 6))
    parts = [begin + step * index for begin, step, num in layout.joins.tolist() for index in range(num)]
    assert sorted(parts) == list(range(layout.sizes.parts))
    assert (layout.joins[10:90, 2] == 0).all(), "many tokens attend at once"
    assert layout.sizes.whole_items == 5
    assert layout.sizes.tokens == 96


@pytest.mark.parametrize("sizes", [InputSizes(1, 1, 0, 1, 1, 0), InputSizes(7, 13, 3, 5, 9, 81)])
def test_every_field_is_aligned(sizes: InputSizes) -> None:
    inputs = StepInputs(sizes, BLOCKS, 4, 16, 0, torch.device("cpu"))
    first = inputs._inputs.data_ptr()
    fields = (inputs.positions, inputs.slots, inputs.lanes, inputs.joins, inputs.pages, inputs.links, inputs.items)
    places = [each.data_ptr() - first for each in (*fields, inputs.whole_items) if each.numel()]
    assert len(places) >= 6
    assert not any(place % ENTRY for place in places)


def test_sizes_fit_only_where_each_does() -> None:
    limits = InputSizes(8, 8, 0, 8, 8, 8)
    assert InputSizes(8, 1, 0, 2, 3, 8).fit(limits)
    assert not InputSizes(8, 1, 1, 2, 3, 8).fit(limits)
    assert not InputSizes(8, 9, 0, 2, 3, 8).fit(limits)
