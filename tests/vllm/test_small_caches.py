"""Sessions at the limits of context and cache."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.vllm.messages import Opening, PlannedSession
from outrider.protocol.sampling_params import SamplingParams
from tests.architectures import tiny_model
from tests.vllm.conftest import RUNNER, Request, loop_over, run, vllm_target
from tests.vllm.test_target import from_truth, requests
from verifier.engine_target import EngineTarget

pytestmark = pytest.mark.timeout(300)


async def test_the_whole_context_can_be_used(model: Path) -> None:
    with vllm_target(model, max_model_len=64) as (target, _):
        assert target.info.context_length == 64
        params = SamplingParams(seed=1, max_tokens=44, temperature=0.0, ignore_eos=True)
        plain = Request("request 0", list(range(20)), params)
        [truth] = await run(loop_over(target), [plain])
        assert len(truth) == 44
        guessed = Request("request 0", list(range(20)), params, gamma=4)
        assert await run(loop_over(target), [guessed], from_truth([truth], "right")) == [truth]


@pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter")
async def test_many_sessions_in_a_small_cache_wait_and_lose_nothing(model: Path, own: EngineTarget) -> None:
    truth = await run(loop_over(own, max_sessions=64), requests(64))
    with vllm_target(model, kv_tokens=3200) as (target, loaded):
        free = loaded.core.free_tokens
        few = loop_over(target, kv_tokens=loaded.core.capacity_tokens)
        assert await run(few, requests(64, gamma=4), from_truth(truth, "mixed")) == truth
        few.stop()
        assert loaded.core.free_tokens == free, "no block is left behind"


@pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter")
def test_layers_with_windows_take_blocks_of_their_own(tmp_path: Path) -> None:
    """A token of this model lies in four blocks: sessions that fill what is counted fit, and no more of them."""
    tiny_model("gemma3_text", {"sliding_window": 64, "head_dim": 32}).save_pretrained(tmp_path)
    with vllm_target(tmp_path, kv_tokens=4096) as (_, loaded):
        core = loaded.core
        assert (core.capacity_tokens, core.free_tokens) == (1024, 1024)
        length = 2 * core.block_tokens
        for number in range(core.capacity_tokens // length):
            core.add(f"s{number}", [1 + number] * length, Opening(SamplingParams(seed=1, max_tokens=8), length))
            core.step({f"s{number}": PlannedSession(length)})
            assert core.free_tokens == 1024 - (number + 1) * length
        core.abort([f"s{number}" for number in range(core.capacity_tokens // length)])


@pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter")
@pytest.mark.parametrize("context", [96, 500])
def test_a_cache_smaller_than_the_context_has_room_for_layers_with_windows(tmp_path: Path, context: int) -> None:
    """vLLM did not start: it wants a whole context, and what the windows of the other layers hold besides."""
    changes = {"sliding_window": 64, "head_dim": 32, "max_position_embeddings": context}
    tiny_model("gemma3_text", changes).save_pretrained(tmp_path)
    with vllm_target(tmp_path, kv_tokens=64) as (_, loaded):
        assert loaded.core.capacity_tokens >= 64


@pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter")
def test_a_cache_takes_no_more_memory_than_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not start where less is free than it is told to take: it was told four times as much here."""
    tiny_model("gemma3_text", {"sliding_window": 64, "head_dim": 32}).save_pretrained(tmp_path)
    free = 129 * 32 * (2 * 1 * 2 * 32 * 4)  # blocks, their tokens, and keys and values of a layer of each kind
    node = SimpleNamespace(total_memory=free, available_memory=free)
    monkeypatch.setattr("vllm.v1.worker.cpu_worker.get_memory_node_info", lambda _: node)
    with vllm_target(tmp_path, kv_tokens=4096) as (_, loaded):
        pool = loaded.core._pool
        assert pool.num_gpu_blocks == 129


def memory_mb() -> float:
    """Return the resident memory without what the allocator keeps free: its places depend on the order of threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter")
async def test_memory_stays_flat_over_two_thousand_sessions(model: Path, own: EngineTarget) -> None:
    """A leak would take some for every round of sessions."""
    truth = await run(loop_over(own, max_sessions=50), requests(50))
    with vllm_target(model, kv_tokens=3200) as (target, loaded):
        free = loaded.core.free_tokens
        loop = loop_over(target, kv_tokens=loaded.core.capacity_tokens)
        resident, objects = [], []
        for _ in range(44):
            assert await run(loop, requests(50, gamma=4), from_truth(truth, "mixed")) == truth
            resident.append(memory_mb())
            objects.append(len(gc.get_objects()))
        loop.stop()
        grown = [after - before for before, after in pairwise(resident[3:])]
        print(f"{resident[3]:.1f} MB after 200 sessions, {resident[-1]:.1f} MB after 2,200, in {sum(map(bool, grown))}")
        print(f"of 40 rounds; {objects[3]} objects, then {objects[-1]}")
        assert loaded.core.free_tokens == free
        assert statistics.quantiles(grown, n=4)[2] < 0.1
        assert objects[-1] - objects[3] < 500


@pytest.mark.skipif(RUNNER == "v2", reason="too slow through the interpreter")
async def test_a_preempted_session_continues_with_the_same_text(
    model: Path, own: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission reserves the whole cache of a session, so vLLM never preempts; here it admits too many."""
    truth = await run(loop_over(own), requests(12))
    with vllm_target(model, kv_tokens=512, max_model_len=256) as (target, loaded):
        preempted: list[str] = []
        scheduler = loaded.core.scheduler
        original = scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.request_id)
            original(request, *args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", preempt)
        assert await run(loop_over(target), requests(12, gamma=4), from_truth(truth, "mixed")) == truth
        assert preempted
