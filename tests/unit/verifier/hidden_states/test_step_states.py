"""The states of a step: what cannot be computed costs nobody else."""

from __future__ import annotations

import pytest
import torch

from outrider.engine import StepResult
from outrider.hidden_states.projection import PackedProjection, Projection
from outrider.protocol.hidden_states.messages import FINAL_STATES, StateSpec
from verifier.hidden_states.step_states import KeptRows, wire_states

WIDTH = 4


def projection_of(num_states: int) -> Projection:
    packed = PackedProjection({"fc.weight": torch.ones(2, num_states * WIDTH)}, 1e-5, [1] * num_states)
    return Projection(packed.data, num_states, WIDTH, torch.device("cpu"))


def step() -> StepResult:
    """Two sessions of three tokens; a row has the final state and those after the layers 1 and 2."""
    return StepResult(torch.empty(0), [0, 0], [torch.ones(3, 3 * WIDTH) for _ in range(2)], (1, 2))


def test_a_projection_of_other_states_costs_only_those_who_ask_for_it() -> None:
    wrong, right = StateSpec((1,), "a" * 64, number=1), StateSpec((1, 2), "a" * 64, number=2)
    kept = [KeptRows((FINAL_STATES, wrong), [0, 1]), KeptRows((right,), [0, 2])]
    held = projection_of(2)
    sent = wire_states(step(), kept, lambda _: held)
    assert [sorted(each) for each in sent] == [[0], [2]]
    assert sent[1][2].tolist() == [[2 * WIDTH] * 2] * 2


def failing(error: Exception) -> Projection:
    class Failing(Projection):
        def __call__(self, states: torch.Tensor) -> torch.Tensor:
            raise error

    packed = PackedProjection({"fc.weight": torch.ones(2, WIDTH)}, 1e-5, [1])
    return Failing(packed.data, 1, WIDTH, torch.device("cpu"))


def test_a_failure_of_the_device_is_not_hidden() -> None:
    projection = failing(torch.AcceleratorError("an illegal memory access"))
    kept = [KeptRows((), []), KeptRows((StateSpec((1,), "a" * 64, number=1),), [0])]
    with pytest.raises(torch.AcceleratorError):
        wire_states(step(), kept, lambda _: projection)


def test_a_projection_without_memory_costs_only_those_who_ask_for_it() -> None:
    """Unlike other errors of the device, it leaves the device as it was: the target's steps need no more of it."""
    projection = failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    kept = [KeptRows((FINAL_STATES,), [0]), KeptRows((FINAL_STATES, StateSpec((1,), "a" * 64, number=1)), [0])]
    assert [sorted(each) for each in wire_states(step(), kept, lambda _: projection)] == [[0], [0]]


def test_sessions_of_a_step_get_the_same_states_in_their_own_formats() -> None:
    small, plain = StateSpec((1,), float8=True, number=1), StateSpec((1,), number=3)
    sent = wire_states(step(), [KeptRows((small,), [2]), KeptRows((plain,), [0, 1])], lambda _: None)
    assert sent[0][1].shape == (1, WIDTH + 1), "a byte each, and one for the scale"
    assert sent[1][3].shape == (2, WIDTH)
    assert sent[1][3].element_size() == 2
