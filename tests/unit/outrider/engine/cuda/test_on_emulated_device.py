"""The CUDA engine on an emulated device: graphs are captured and replayed, nothing mixes devices, little waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.engine import SessionTokens
from outrider.engine.cuda import engine as engines
from outrider.engine.cuda.engine import CudaGraphEngine
from outrider.engine.interface import prefill
from tests.emulated_cuda import Counts, EmulatedDevice, emulated_cuda
from tests.gpu import test_cuda as gpu
from tests.gpu.test_cuda import captured, graphs_of
from tests.unit.outrider.engine.cuda.test_engine import MODELS, TOKENS, seeded
from tests.unit.outrider.engine.test_engine import FAMILIES

STEP_LAUNCHES = 2  # the inputs in one copy, and the graph
PROMPT_LAUNCHES = {"llama": 100, "sliding window": 110, "capped scores": 155}  # of two layers and two attention groups


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with emulated_cuda() as device:
        yield device


def _counts(device: EmulatedDevice, engine: CudaGraphEngine, batch: list[SessionTokens]) -> Counts:
    """Run a step as a service does, which reads its result before the next one, and return what it took."""
    torch.cuda.synchronize()
    device.counts = Counts()
    engine.extend(batch)
    return device.counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_devices_test_of_a_family(family: str, device: EmulatedDevice) -> None:
    """Prompts, trees and rollbacks, in float32 and bfloat16; every bucket is captured."""
    gpu.test_every_family_answers_as_on_the_cpu(family)
    assert device.counts.replays > 0


@pytest.mark.parametrize(
    "test",
    [
        gpu.test_engine_answers_as_on_the_cpu,
        gpu.test_draws_on_the_device,
        partial(gpu.test_the_fast_engine_is_the_one_that_is_taken, dtype="float32"),
        gpu.test_int8_is_refused_on_a_gpu,
    ],
)
@pytest.mark.usefixtures("device")
def test_a_devices_other_tests(test: Callable[..., None], tmp_path: Path) -> None:
    test(tmp_path)


@pytest.mark.usefixtures("device")
def test_a_devices_tests_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.test_warm_up_leaves_nothing_to_capture_for_a_common_step()
    gpu.test_a_capture_without_memory_falls_back(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_a_common_step_is_one_copy_and_one_graph(name: str, device: EmulatedDevice) -> None:
    engine = graphs_of(seeded(MODELS[name]).cuda(), 4096)
    engine.warm_up()
    common = set(captured(engine))
    for count in (1, 3, 8):
        counts = _counts(device, engine, [SessionTokens("s", TOKENS[:count])])
        assert (counts.all_launches, counts.syncs.total()) == (STEP_LAUNCHES, 0), counts
    assert set(captured(engine)) == common


def test_32_sessions_are_one_copy_and_one_graph_too(device: EmulatedDevice) -> None:
    engine = graphs_of(seeded(MODELS["llama"]).cuda(), 4096)
    batch = [SessionTokens(str(i), TOKENS[i : i + 2]) for i in range(32)]
    engine.extend(batch)
    counts = _counts(device, engine, batch)
    assert captured(engine) == [(64, ())]
    assert (counts.all_launches, counts.syncs.total()) == (STEP_LAUNCHES, 0), counts


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_takes_few_launches_beside_others(name: str, device: EmulatedDevice) -> None:
    """A prompt attends to its context at once, the others in ranges."""
    engine = graphs_of(seeded(MODELS[name]).cuda(), 4096)
    prefill(engine, "a", TOKENS[:40])
    counts = _counts(device, engine, [SessionTokens("p", TOKENS[:300]), SessionTokens("a", TOKENS[:4])])
    assert counts.all_launches <= PROMPT_LAUNCHES[name], counts
    assert counts.syncs.total() == 0, counts


def test_accepting_a_branch_waits_for_nothing(device: EmulatedDevice) -> None:
    engine = graphs_of(seeded(MODELS["llama"]).cuda(), 1024)
    engine.extend([SessionTokens("s", TOKENS[:4], (-1, -1, 1, 2))])
    device.counts = Counts()
    engine.compact("s", 0, [1, 2])
    assert (device.counts.all_launches, device.counts.syncs.total()) == (5, 0), device.counts


def test_a_capture_that_waits_falls_back(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(engines.log, "warning", lambda event, **_: said.append(event))
    engine = graphs_of(seeded(MODELS["llama"]).cuda(), 1024)
    wanted = engine.extend([SessionTokens("s", TOKENS[:3])]).logits[0].cpu()
    run = engine._decoder.run
    monkeypatch.setattr(engine._decoder, "run", lambda inputs, *more: (int(inputs.ids[0]), run(inputs, *more))[1])
    found = engine.extend([SessionTokens("t", TOKENS[:3]), SessionTokens("u", TOKENS[:3])]).logits[0].cpu()
    assert said == ["graph capture failed, steps are slower"]
    assert torch.allclose(found, wanted, atol=1e-5)
