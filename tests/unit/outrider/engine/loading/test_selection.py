"""The engine that is asked for runs, or the start fails with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from outrider.base.config import ENGINES, WorkerSettings, deprecated_options, selected_engine
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import NativeEngine
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.errors import StartupError
from outrider.testing.toy_models import make_model
from tests.architectures import save


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


@pytest.mark.parametrize(
    ("chosen", "field", "reason"),
    [
        ({"engine": "cuda"}, "engine", "needs a CUDA device"),
        ({"engine": "cuda", "device": "cpu"}, "engine", "weights in float32 on cpu"),
        ({"engine": "native", "dtype": "float16"}, "engine", "weights in float16"),
        ({"engine": "native", "device": "cuda"}, "device", "no CUDA device is usable here"),
        ({"engine": "transformers", "quantization": "int8"}, "quantization", "needs engine native"),
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
    assert options(engine=engine, device=device).selected_device == torch.device(chosen)


@pytest.mark.parametrize(
    ("compile_", "available", "engine"),
    [
        ("", False, "auto"),
        ("auto", True, "auto"),
        ("on", False, "native"),
        ("on", True, "cuda"),
        ("off", True, "transformers"),
    ],
)
def test_compile_maps_to_an_engine(
    monkeypatch: pytest.MonkeyPatch, compile_: str, available: bool, engine: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    settings = WorkerSettings(compile=compile_)
    assert EngineOptions.of(settings).engine == engine
    assert [option for option, _ in settings.deprecated] == ([f"--compile {compile_}"] if compile_ else [])


def test_compile_and_engine_must_agree() -> None:
    agreeing = {("native", "on"), ("cuda", "on"), ("transformers", "off")}
    for engine in ENGINES[1:]:
        for compile_ in ("on", "off"):
            if (engine, compile_) in agreeing:
                assert selected_engine(engine, compile_) == engine
                continue
            with pytest.raises(StartupError, match="leave out --compile") as caught:
                selected_engine(engine, compile_)
            assert caught.value.field == "compile"


def test_the_old_name_of_the_mock_engine_is_mapped() -> None:
    assert selected_engine("instant", "") == "mock"
    assert deprecated_options("instant", "") == [("--engine instant", "--engine mock")]
    assert deprecated_options("mock", "") == []
