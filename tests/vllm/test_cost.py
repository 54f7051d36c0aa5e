"""What Outrider's scheduler and judge add to a step of vLLM, both in one process by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.vllm.core import CoreOptions, VllmCore
from outrider.engine.vllm.messages import Opening, PlannedSession
from outrider.models.hub import DEFAULT, locate_safetensors
from outrider.protocol.sampling_params import SamplingParams
from tests.vllm.conftest import RUNNER

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(RUNNER == "v2", reason="the interpreter's times mean nothing"),
]

CONTEXT = 64
STEPS = 12
ROUNDS = 5
MOST = 32
KV_TOKENS = 16_384


class Plain:
    """vLLM's engine core as it is."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        args = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=MOST,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            async_scheduling=False,
            kv_cache_memory_bytes=2 << 30,
        )
        config = args.create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)

    def add(self, name: str, tokens: list[int], temperature: float) -> None:
        from vllm import SamplingParams as VllmSampling
        from vllm.v1.engine import EngineCoreRequest

        sampling = VllmSampling(max_tokens=1000, ignore_eos=True, temperature=temperature, seed=1, detokenize=False)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=name,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> None:
        _, executed = self.core.step_fn()
        self.core.post_step(executed)


@pytest.fixture(scope="module")
def smollm() -> Path:
    return Path(locate_safetensors(DEFAULT, print))


@pytest.fixture(scope="module")
def engines(smollm: Path) -> Any:
    more = "--enforce-eager --max-model-len 2048"
    ours = VllmCore(CoreOptions("float32", 8, MOST, 512, kv_tokens=KV_TOKENS, more=more, model=smollm))
    # See conftest: the kernels of a second core are those of the first.
    type(import_module("vllm.platforms").current_platform).register_triton_kernel_overrides = lambda *_: None
    plain = Plain(smollm)
    yield plain, ours
    ours.close()


def seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - began) / STEPS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sessions", [1, 8, MOST])
def test_a_step_costs_what_it_costs_in_vllm(engines: tuple[Plain, VllmCore], sessions: int, temperature: float) -> None:
    plain, ours = engines
    names = [f"{sessions} {temperature} {index}" for index in range(sessions)]
    params = SamplingParams(seed=1, temperature=temperature, max_tokens=1000)
    prompts = [[3 + (7 * index + position) % 1000 for position in range(CONTEXT)] for index in range(sessions)]
    for name, tokens in zip(names, prompts, strict=True):
        plain.add(name, tokens, temperature)
        ours.add(name, tokens, Opening(params, CONTEXT), salt=name)
    plan = {name: PlannedSession(1) for name in names}
    for _ in range(3):
        plain.step()
    ours.step({name: PlannedSession(CONTEXT) for name in names})
    ours.step(plan)
    ratios = []
    for _ in range(ROUNDS):
        theirs = seconds(plain.step)
        mine = seconds(lambda: ours.step(plan))
        ratios.append(mine / theirs)
    plain.core.abort_requests(names)
    ours.abort(names)
    ratio = statistics.median(ratios)
    print(f"{sessions} sessions, T {temperature}: {ratio:.3f} x vLLM's step ({min(ratios):.3f} to {max(ratios):.3f})")
    assert ratio <= 1.03
