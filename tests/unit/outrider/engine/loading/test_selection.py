"""The engine that is asked for runs, or the start fails with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from transformers import OPTConfig, OPTForCausalLM, VoxtralConfig

from outrider.engine.cuda import decoder
from outrider.engine.cuda.engine import CudaGraphEngine
from outrider.engine.cuda.step_inputs import StepInputs
from outrider.engine.loading import selection
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions, pick_device
from outrider.engine.loading.selection import startup_errors
from outrider.engine.model_spec import UnsupportedModel
from outrider.engine.native import NativeEngine
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.errors import StartupError
from outrider.testing.toy_models import byte_tokenizer, make_model
from tests import emulated_cuda as emulation
from tests.architectures import save
from tests.emulated_cuda import emulated_cuda


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("llama"), seed=1))


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A family without a model spec."""
    config = OPTConfig(
        vocab_size=260, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32
    )
    folder = tmp_path_factory.mktemp("opt")
    save(OPTForCausalLM(config).eval(), folder)
    return str(folder)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def options(**chosen: Any) -> EngineOptions:
    return EngineOptions(**({"kv_tokens": 512, "threads": 1} | chosen))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("engine", "kind", "name"),
    [
        ("auto", NativeEngine, "native"),
        ("native", NativeEngine, "native"),
        ("transformers", TransformersEngine, "transformers"),
    ],
)
def test_the_engine_that_is_named_runs(llama: str, engine: str, kind: type, name: str) -> None:
    said: list[str] = []
    assert isinstance(load_model(llama, options(engine=engine), said.append).engine, kind)
    assert f"engine {name} on cpu, weights in float32" in said


def test_only_auto_falls_back_to_transformers(opt: str) -> None:
    said: list[str] = []
    assert isinstance(load_model(opt, options(device="cpu"), said.append).engine, TransformersEngine)
    assert any("engine native not usable" in line and "'opt'" in line for line in said)
    with pytest.raises(
        StartupError, match=r"engine native cannot run .*no model spec for models of type 'opt'"
    ) as caught:
        load_model(opt, options(device="cpu", engine="native"))
    assert (caught.value.field, caught.value.value, caught.value.limit) == (
        "engine",
        "native",
        "auto or transformers here",
    )


def test_a_model_that_hears_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """The words of transformers name some hundred classes."""
    VoxtralConfig().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=r"^target is of type voxtral, must be a language model that transformers"):
        load_model(str(tmp_path), options(device="cpu"))


@pytest.mark.parametrize(
    ("chosen", "field", "reason"),
    [
        ({"engine": "cuda"}, "engine", "needs a CUDA device"),
        ({"engine": "cuda", "device": "cpu"}, "engine", "weights in float32 on cpu"),
        ({"engine": "native", "dtype": "float16"}, "engine", "weights in float16"),
        ({"engine": "native", "device": "cuda"}, "device", "no CUDA device is usable here"),
        ({"engine": "transformers", "quantization": "int8"}, "quantization", "needs engine native"),
        (
            {"quantization": "fp8"},
            "quantization",
            r"fp8 needs engine native \(int8\) or vllm \(others\): not named, or",
        ),
        ({"engine": "mock"}, "engine", "runs no model"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_an_engine_that_cannot_run_is_refused_with_the_reason(
    llama: str, chosen: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(StartupError, match=reason) as caught:
        load_model(llama, options(**chosen))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("engine", "device", "available", "chosen"),
    [
        ("auto", "auto", True, "cuda:0"),
        ("auto", "auto", False, "cpu"),
        ("native", "auto", True, "cpu"),
        ("cuda", "auto", True, "cuda:0"),
        ("transformers", "auto", True, "cuda:0"),
        ("native", "cuda:1", True, "cuda:1"),
    ],
)
def test_the_engine_decides_the_device_where_that_is_auto(
    monkeypatch: pytest.MonkeyPatch, engine: str, device: str, available: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * available)
    assert pick_device(device, engine) == torch.device(chosen)


def test_a_gpu_that_is_not_there_is_told_before_torch_fails_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StartupError, match="device is cuda:2, must be one of the 2 here, cuda:0 to cuda:1"):
        pick_device("cuda:2")


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.\nMore."


@pytest.mark.parametrize(
    ("reason", "chosen"),
    [
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "cpu"),
        ("No CUDA GPUs are available", "cpu"),
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", "cpu"),
        (
            OLD_DRIVER,
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.",
        ),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "CUDA unknown error"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_torch_cannot_use_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, reason: str, chosen: str
) -> None:
    def init() -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", init)
    for device in ("cpu", "auto"):
        if device == "cpu" or chosen == "cpu":
            assert pick_device(device) == torch.device("cpu")
            continue
        with pytest.raises(StartupError, match=re.escape(f"torch cannot use the GPU: {chosen}")) as caught:
            pick_device(device)
        assert (caught.value.field, caught.value.limit) == ("device", "cpu")
        assert "More" not in str(caught.value)
    assert pick_device("auto", "native") == torch.device("cpu")


@pytest.mark.parametrize(("engine", "kind"), [("auto", CudaGraphEngine), ("transformers", TransformersEngine)])
def test_the_cache_takes_most_of_a_gpus_free_memory(
    monkeypatch: pytest.MonkeyPatch, llama: str, engine: str, kind: type
) -> None:
    monkeypatch.setattr(selection, "_GPU_RESERVE", 1 << 20)
    per_token = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, width, bytes of bfloat16
    with emulated_cuda() as device:
        found = []
        for device.free_bytes in (1 << 20, 4 << 20):
            loaded = load_model(llama, options(engine=engine, device="cuda", kv_tokens=None)).engine
            assert isinstance(loaded, kind)
            found.append(loaded.capacity_tokens * per_token / device.free_bytes)
    assert found == pytest.approx([0.9 * 0.5, 0.9 * 0.75], rel=0.02)


def test_a_cache_for_which_there_is_no_memory_is_no_fault_of_the_model() -> None:
    message = "not enough memory for big and its KV cache, --kv-tokens: .*allocate"
    with pytest.raises(StartupError, match=message), startup_errors("big", "LlamaForCausalLM"):
        torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize("error", [UnsupportedModel("its kernels need Triton"), RuntimeError("Python.h: no such file")])
def test_where_the_kernels_do_not_run_transformers_does(
    monkeypatch: pytest.MonkeyPatch, llama: str, error: Exception
) -> None:
    def no_kernels() -> None:
        raise error

    said: list[str] = []
    with emulated_cuda():
        monkeypatch.setattr(decoder, "_kernels", no_kernels)
        loaded = load_model(llama, options(device="cuda"), said.append).engine
        assert isinstance(loaded, TransformersEngine)
        assert any("engine cuda not usable" in line and str(error) in line for line in said)
        with pytest.raises(StartupError, match="engine cuda cannot run"):
            load_model(llama, options(device="cuda", engine="cuda"))


def test_a_kernel_of_prompts_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, llama: str) -> None:
    attend = emulation.attend_in_torch

    def wrong(queries: Any, cache: Any, inputs: StepInputs, out: torch.Tensor, *more: Any) -> None:
        attend(queries, cache, inputs, out, *more)
        for lane, *_ in inputs.whole_items[: int(inputs.num_items[1])].tolist():
            token, _, live = inputs.lanes[lane].tolist()[:3]
            out[token : token + live] = 0

    monkeypatch.setattr(emulation, "attend_in_torch", wrong)
    with emulated_cuda():
        assert isinstance(load_model(llama, options(device="cuda")).engine, TransformersEngine)


def test_elsewhere_the_cache_has_the_size_that_is_given(llama: str) -> None:
    with emulated_cuda():
        assert load_model(llama, options(device="cuda")).engine.capacity_tokens == 512
    assert load_model(llama, options(device="cpu", kv_tokens=None)).engine.capacity_tokens == 65_536


def test_a_setting_that_vllm_refuses_is_no_fault_of_the_models_files() -> None:
    class ModelConfig(BaseModel):
        max_model_len: int

    told = r"^cannot load model 'm': ValidationError: 1 validation error for ModelConfig"
    with pytest.raises(StartupError, match=told), startup_errors("m"):
        ModelConfig.model_validate({"max_model_len": "long"})
