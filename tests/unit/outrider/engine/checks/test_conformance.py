"""At start every engine is held against the model's own forward: planted bugs are found, what cannot be served is
refused in a sentence."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers.masking_utils import blockwise_overlay, causal_mask_function

from outrider.engine import SessionTokens
from outrider.engine.checks import conformance
from outrider.engine.checks.conformance import reference_texts
from outrider.engine.checks.reference import reference_logits, weights_in_format
from outrider.engine.loading import selection
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.model_spec import ModelSpec, build_spec
from outrider.engine.native import NativeEngine
from outrider.engine.transformers.attention import RaggedStep, allowed
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.errors import ModelMismatch, StartupError
from tests.architectures import DYNAMIC, LLAMA3, LONGROPE, ORIGINAL, difference, save, tiny_model

FAR_SCALING = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
KV_TOKENS = 512


def saved(folder: Path, family: str, **changes: Any) -> str:
    save(tiny_model(family, changes), folder)
    return str(folder)


def load(model: str, **options: Any) -> Any:
    said: list[str] = []
    chosen: dict[str, Any] = {"device": "cpu", "kv_tokens": KV_TOKENS} | options
    return load_model(model, EngineOptions(**chosen), said.append).engine, said


def without_windows(built: ModelSpec) -> ModelSpec:
    return dataclasses.replace(built, layers=tuple(dataclasses.replace(layer, window=None) for layer in built.layers))


def without_scaling(built: ModelSpec) -> ModelSpec:
    """The rotation that the same model has without a `rope_parameters` of its own."""
    plain = build_spec(tiny_model("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}))
    return dataclasses.replace(built, rotations=plain.rotations)


def without_cap(built: ModelSpec) -> ModelSpec:
    return dataclasses.replace(built, softcap=0.0)


def without_logit_cap(built: ModelSpec) -> ModelSpec:
    return dataclasses.replace(built, logit_softcap=0.0)


PLANTED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "Mistral's window": (without_windows, "mistral", {}),
    "a window too far to be run past": (
        without_windows,
        "mistral",
        {"sliding_window": 4096, "max_position_embeddings": 32768},
    ),
    "Gemma 2's cap of scores": (without_cap, "gemma2", {"attn_logit_softcapping": 1.0}),
    "Gemma 2's cap of logits": (without_logit_cap, "gemma2", {"final_logit_softcapping": 3.0}),
    "Llama 3's scaling": (without_scaling, "llama", {"rope_parameters": FAR_SCALING}),
}


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("bug", "family", "changes"), PLANTED.values(), ids=PLANTED.keys())
def test_a_plan_that_lost_something_is_not_used(
    bug: Any, family: str, changes: dict[str, Any], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, family, **changes)
    options = {"quantization": weights} if weights.startswith("int") else {"dtype": weights}
    assert isinstance(load(model, **options)[0], NativeEngine)
    monkeypatch.setattr(selection, "build_spec", lambda model: bug(build_spec(model)))
    if "quantization" in options:
        with pytest.raises(StartupError, match=f"{weights} needs engine native"):
            load(model, **options)
    else:
        engine, said = load(model, **options)
        assert isinstance(engine, TransformersEngine)
        assert any("its model spec differs" in line for line in said)


def test_a_mask_that_is_ignored_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: attention believed that it is causal, with the window that the layer names."""
    model = saved(tmp_path, "llama4_text", attn_temperature_tuning=False)
    assert isinstance(load(model)[0], TransformersEngine)
    monkeypatch.setattr(RaggedStep, "_rule", lambda *_: causal_mask_function)
    with pytest.raises(StartupError, match=r"in one pass its answers are .* away from the model itself"):
        load(model)


def test_state_that_leaks_between_sessions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and a recurrent mixer in every layer: all layers attend, and yet there is more."""
    model = saved(tmp_path, "falcon_h1")
    with pytest.raises(StartupError, match="layer 0 keeps a LinearAttentionAndFullAttentionLayer"):
        load(model)
    monkeypatch.setattr(conformance, "unsupported_state", lambda _: None)
    with pytest.raises(StartupError, match=r"pieces its answers are .* away|with another session its answers are"):
        load(model)


def longrope(folder: Path, family: str = "phi3", **changes: Any) -> str:
    scaling = LONGROPE | ({"short_mscale": 1.1, "long_mscale": 1.3} if family == "phimoe" else {})
    return saved(folder, family, rope_parameters=scaling, original_max_position_embeddings=ORIGINAL, **changes)


@pytest.mark.parametrize("engine_name", ["auto", "transformers"])
@pytest.mark.parametrize("family", ["phi3", "phimoe", "llama"])
def test_no_row_decides_how_others_turn(family: str, engine_name: str, tmp_path: Path) -> None:
    """Rotations that change with the longest position of a step: a guess or a neighbour past it changes nothing."""
    if family == "llama":
        model = saved(tmp_path, family, rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)
    else:
        model = longrope(tmp_path, family)
    engine, said = load(model, engine=engine_name)
    assert engine.info.context_length == ORIGINAL
    assert family == "llama" or any(f"context limited to {ORIGINAL} of 96 tokens" in line for line in said)
    assert difference(engine, tmp_path) == ""
    wanted = engine.extend([SessionTokens("alone", [5, 6, 7, 8])]).logits[0].clone()
    engine.extend([SessionTokens("long", [9] * (ORIGINAL - 1))])
    found = engine.extend([SessionTokens("long", [9] * 8), SessionTokens("beside", [5, 6, 7, 8])]).logits[1]
    assert torch.allclose(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_rotation_that_is_not_known_as_one_is_found_by_a_far_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = longrope(tmp_path)
    monkeypatch.setattr(selection, "fix_rotations", lambda _, context: context)
    with pytest.raises(StartupError, match="with a token at a far position"):
        load(model)


def test_a_mask_of_the_models_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="layer 0 makes an attention mask of its own"):
        load(saved(tmp_path, "doge"))


def test_masks_that_depend_on_more_than_positions_are_refused() -> None:
    images = torch.full((1, 4), -1)
    with pytest.raises(ModelMismatch, match="depends on more than positions"):
        allowed(blockwise_overlay(images), torch.arange(8), torch.arange(8))


def test_positions_counted_within_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="a token's index in the step"):
        load(saved(tmp_path, "llama4_text", attn_temperature_tuning=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arithmetic_in_fewer_bits_is_judged_by_its_own_rounding(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, "mistral")
    load(model, dtype=dtype, engine="transformers")
    monkeypatch.setattr(RaggedStep, "_rule", lambda *_: causal_mask_function)
    with pytest.raises(StartupError, match="away from the model itself"):
        load(model, dtype=dtype, engine="transformers")


def test_a_check_that_lacks_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr("outrider.engine.checks.conformance.weights_in_format", no_memory)
    with capture_logs() as logs:
        load(saved(tmp_path, "mistral"), dtype="bfloat16", engine="transformers")
    (warning,) = [each for each in logs if each["log_level"] == "warning"]
    assert warning["tolerance"] == 0.1
    assert warning["error"] == "CUDA out of memory. Tried to allocate 2 GiB."


def test_weights_are_the_models_own_again_after_they_were_read_otherwise() -> None:
    model = tiny_model("llama", {})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = reference_logits(model, [1, 2, 3])
    with weights_in_format(model, "int8"):
        assert not torch.equal(reference_logits(model, [1, 2, 3]), wanted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(reference_logits(model, [1, 2, 3]), wanted)


def test_the_smallest_cache_has_room_for_the_check(tmp_path: Path) -> None:
    assert isinstance(load(saved(tmp_path, "llama"), kv_tokens=64)[0], NativeEngine)


def share_tolerance(meeting: str) -> float:
    """Return the tolerance for a model whose weights are a rank's."""
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        model = tiny_model("llama", {}).bfloat16()
        mesh = init_device_mesh("cpu", (1,))
        for module in (each for each in model.modules() if isinstance(each, torch.nn.Linear)):
            share = distribute_tensor(module.weight.detach(), mesh, [Replicate()])
            module.weight = torch.nn.Parameter(share, requires_grad=False)
            module.register_forward_pre_hook(lambda _, x: (DTensor.from_local(x[0], mesh, [Replicate()]),))
            module.register_forward_hook(lambda _, __, out: out.to_local())
        return conformance._rounding_tolerance(model, reference_texts(model, 8))
    finally:
        dist.destroy_process_group()


def test_a_ranks_share_is_compared_with_float32_too(tmp_path: Path) -> None:
    """As without ranks: the tolerance of 16 bits comes from the model's own distance to float32."""
    spawn = multiprocessing.get_context("spawn")  # after gloo has run in a process, its forks hang
    with ProcessPoolExecutor(1, spawn) as pool:
        found = pool.submit(share_tolerance, (tmp_path / "meeting").as_uri()).result(100)
    assert found < conformance._UNKNOWN_ROUNDING
