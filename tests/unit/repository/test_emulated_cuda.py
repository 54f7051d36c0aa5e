"""The emulated CUDA device is as strict as a real one: where memory is, what waits, what a graph replays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.emulated_cuda import CUDA, DeviceMismatch, EmulatedDevice, emulated_cuda

HOST = torch.ones(4)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with emulated_cuda() as device:
        yield device


def test_tensors_are_where_their_memory_is(device: EmulatedDevice) -> None:
    made = torch.zeros(3, 4, device="cuda")
    seen = [made[1:], made.view(-1), made.T, made + 1, torch.tensor([1], device=CUDA), made.new_zeros(2), HOST.cuda()]
    assert all(each.is_cuda and each.device == CUDA for each in seen)
    assert not any(each.is_cuda for each in (made.cpu(), HOST, torch.zeros(3)))
    layer = torch.nn.Linear(4, 4).to("cuda")
    assert copy.deepcopy(layer).weight.is_cuda
    layer(made).sum().backward()
    assert layer.weight.grad.is_cuda


@pytest.mark.parametrize(
    "mix",
    [
        lambda there: there + HOST,
        lambda there: there.add_(HOST),
        lambda there: torch.cat([HOST, there]),
        lambda there: torch.nn.functional.linear(HOST, there.view(1, 4)),
        lambda there: HOST[there.long()],
        lambda there: torch.where(there > 0, HOST, there),
        lambda there: torch.tensor([0]).new_zeros(4).index_copy_(0, there.long(), there.long()),
    ],
)
def test_devices_do_not_mix(mix: Callable[[torch.Tensor], object], device: EmulatedDevice) -> None:
    there = torch.ones(4, device="cuda")
    with pytest.raises(DeviceMismatch):
        mix(there)
    assert (there * torch.tensor(2.0)).is_cuda  # a single number may come from the host


@pytest.mark.parametrize(
    ("act", "waits"),
    [
        (lambda there: there.tolist(), 1),
        (lambda there: float(there[0]), 1),
        (lambda there: there.cpu(), 1),
        (lambda there: bool((there > 0).all()), 1),
        (lambda there: there[there > 0], 1),
        (lambda there: there[torch.tensor([1])], 1),
        (lambda there: torch.equal(there, there), 1),
        (lambda there: HOST.to("cuda"), 1),
        (lambda there: HOST.to("cuda", non_blocking=True), 1),
        (lambda there: there.copy_(HOST), 1),
        (lambda there: torch.tensor([1.0], device="cuda"), 1),
        (lambda there: HOST.pin_memory().to("cuda", non_blocking=True), 0),
        (lambda there: there[1:].mul_(2).argmax(), 0),
    ],
)
def test_what_waits_is_counted(act: Callable[[torch.Tensor], object], waits: int, device: EmulatedDevice) -> None:
    there = torch.ones(4, device="cuda")
    act(there)
    assert device.counts.syncs.total() == waits


def test_numbers_leave_the_device_only_by_a_copy(device: EmulatedDevice) -> None:
    for read in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="numpy"):
            read(torch.ones(4, device="cuda"))


def test_launches_are_counted_but_not_views(device: EmulatedDevice) -> None:
    there = torch.empty(4, 4, device="cuda")
    there[1:].view(-1)[:, None].expand(-1, 3)
    assert device.counts.all_launches == 0
    torch.softmax(there.mul_(2) + 1, dim=-1)
    assert device.counts.launches == {"mul_": 1, "add": 1, "_softmax": 1}


def test_a_graph_computes_again_with_what_it_captured(device: EmulatedDevice) -> None:
    read, written = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    baked = 3.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (read * baked + torch.arange(4, device="cuda")).softmax(dim=0)
        written[1:].add_(result[1:])
    baked = 5.0
    read.fill_(2.0)
    written.zero_()
    launches = device.counts.all_launches
    graph.replay()
    assert device.counts.all_launches == launches + 1
    wanted = (torch.full((4,), 2.0) * 3.0 + torch.arange(4)).softmax(dim=0)
    assert torch.equal(result.cpu(), wanted)
    assert written.tolist() == [0.0, *wanted[1:].tolist()]


def test_nothing_waits_in_a_capture(device: EmulatedDevice) -> None:
    there = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        there.tolist()
    assert not torch.cuda.is_current_stream_capturing()


def test_waiting_for_an_event_is_free_once_the_host_has_waited(device: EmulatedDevice) -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    event.synchronize()
    event.synchronize()
    assert device.counts.syncs == {"event": 1}


def test_it_ends() -> None:
    with emulated_cuda():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
