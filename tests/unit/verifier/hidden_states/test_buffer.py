"""The buffer of a session: what it holds in memory, and what a verdict carries of it."""

from __future__ import annotations

import pytest
import torch

from outrider.protocol.hidden_states.messages import StateSpec, StateSpecs
from verifier.hidden_states import buffer as module
from verifier.hidden_states.buffer import PROMPT_WINDOW, HiddenStateBuffer
from verifier.hidden_states.kept import KeptStates, StateBlocks

WIDTH = 4


def rows(first: int, end: int) -> torch.Tensor:
    """Each row tells its position."""
    return torch.arange(first, end, dtype=torch.float16)[:, None].expand(-1, WIDTH).clone()


def bytes_under(parts: list[torch.Tensor]) -> int:
    return sum(part.untyped_storage().nbytes() for part in parts)


def test_a_long_prompt_does_not_stay_in_memory() -> None:
    end = PROMPT_WINDOW + 1000
    buffer = HiddenStateBuffer(True, "s", [0] * end)
    buffer.add(900, {0: rows(0, 900)})
    assert not buffer._parts
    buffer.add(1100, {0: rows(900, 1100)})
    assert bytes_under(buffer._parts[0][1]) == 100 * WIDTH * 2
    taken = buffer.take(end - 1, {0: rows(1100, end - 1)}, (5,))
    assert (taken[0].position, taken[0].count) == (1000, PROMPT_WINDOW - 1)


def test_the_newest_block_is_not_a_view_of_all_rows() -> None:
    blocks = StateBlocks(KeptStates(), "s", [0] * 100)
    blocks.keep(StateSpec(), 0, rows(0, 70))
    assert bytes_under(blocks._open[0][1]) == 6 * WIDTH * 2


def test_rows_are_not_joined_across_a_gap() -> None:
    buffer = HiddenStateBuffer(True, "s", [0] * 60)
    buffer.add(20, {0: rows(0, 20)})
    buffer.add(40, {})  # its projection was gone
    taken = buffer.take(60, {0: rows(40, 60)}, (5,))
    assert (taken[0].position, taken[0].count) == (40, 20)
    assert taken[0].rows == rows(40, 60).numpy().tobytes()


def test_the_states_of_a_verdict_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_VERDICT_BYTES", 2 * 10 * WIDTH * 2)
    buffer = HiddenStateBuffer(True, "s", [0] * 60)
    buffer.steer(others=StateSpecs((StateSpec((1,), number=1),)))
    taken = buffer.take(60, {number: rows(0, 60) for number in (0, 1)}, (5,))
    assert [(taken[number].position, taken[number].count) for number in (0, 1)] == [(50, 10)] * 2
    assert taken[1].rows == rows(50, 60).numpy().tobytes()
