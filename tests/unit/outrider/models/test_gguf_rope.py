"""Positions are scaled as a GGUF file says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.native import NativeEngine, dequantize
from outrider.models import in_place
from outrider.models.gguf import convert_gguf
from outrider.models.hub import locate
from outrider.models.in_place import load_in_place
from outrider.protocol.errors import StartupError
from tests.gguf_files import write_gguf
from tests.unit.outrider.models.gguf_models import SMALL, TOKENS, options, scaled_file, weights_of_transformers

pytestmark = pytest.mark.usefixtures("own_home")


UNSCALED = 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
FACTORS = [1.0] * 12 + [1.0 + 7.0 * step / 9 for step in range(1, 9)] + [8.0] * 12
FREQUENCIES = {"rope_freqs.weight": FACTORS}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}


def rotary_of(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).model.rotary_emb


def scaled_model(path: Path) -> Any:
    """The model of transformers, which reads no scaling, with the frequencies that the file asks for."""
    model = weights_of_transformers(path)
    assert torch.allclose(model.model.rotary_emb.inv_freq, UNSCALED)
    model.model.rotary_emb.inv_freq /= torch.tensor(FACTORS)
    return model


@pytest.mark.parametrize("position", [10, 2046, 2047, 5000])
def test_a_factor_of_each_frequency_holds_at_short_and_long_positions(position: int, tmp_path: Path) -> None:
    rotary = rotary_of(locate(str(scaled_file(tmp_path, vectors=FREQUENCIES)), print))
    wanted = UNSCALED / torch.tensor(FACTORS)
    assert torch.allclose(rotary.inv_freq, wanted)
    cos, sin = rotary(torch.zeros(1), torch.tensor([[0, position]]))
    angles = (position * wanted).repeat(2)
    assert torch.allclose(cos[0, 1], angles.cos(), atol=2e-3)
    assert torch.allclose(sin[0, 1], angles.sin(), atol=2e-3)
    assert torch.allclose(rotary.inv_freq, wanted)


def test_models_read_in_place_and_converted_ones_rotate_by_the_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scaled_file(tmp_path, vectors=FREQUENCIES)
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        wanted, unscaled = scaled_model(path)(ids).logits, weights_of_transformers(path)(ids).logits
        folder = locate(str(path), print)
        found = load_in_place(Path(folder), dequantize, AutoConfig.from_pretrained(folder))
        assert found is not None
        assert torch.allclose(found(ids).logits, wanted, atol=1e-5)
        assert not torch.allclose(unscaled, wanted, atol=1e-2)
    engine = load_model(str(path), options()).engine
    assert isinstance(engine, NativeEngine)
    assert torch.allclose(engine.extend([SessionTokens("s", TOKENS)]).logits[0], wanted[0], atol=1e-4)
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(in_place, "ARCHITECTURES", set())
    engine = load_model(str(path), options()).engine
    assert torch.allclose(engine.extend([SessionTokens("s", TOKENS)]).logits[0], wanted[0], atol=1e-4)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_linear_scaling_divides_positions(tmp_path: Path) -> None:
    rotary = rotary_of(locate(str(scaled_file(tmp_path, fields=LINEAR)), print))
    assert torch.allclose(rotary.inv_freq, UNSCALED / 8)
    scaled = rotary(torch.zeros(1), torch.tensor([[80, 1600]]))
    plain = rotary_of(locate(str(write_gguf(tmp_path / "plain.gguf", SMALL, lambda _: "Q8_0")), print))
    for each, other in zip(scaled, plain(torch.zeros(1), torch.tensor([[10, 200]])), strict=True):
        assert torch.allclose(each, other, atol=1e-4)


def test_only_full_attention_of_gemma3_is_scaled(tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, "gemma3", fields=LINEAR)), print)
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    assert (parameters["full_attention"]["rope_type"], parameters["full_attention"]["factor"]) == ("linear", 8.0)
    assert parameters["sliding_attention"]["rope_type"] == "default"
    rotary = rotary_of(folder)
    assert torch.allclose(rotary.full_attention_inv_freq, UNSCALED / 8)
    assert torch.allclose(rotary.sliding_attention_inv_freq, UNSCALED)


@pytest.mark.parametrize("more", [{}, {"rope.scaling.finetuned": True}], ids=["", "finetuned"])
def test_yarn_is_read_with_its_original_context(more: dict[str, Any], tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, "qwen2", fields=YARN | more)), print)
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10_000.0}
    assert parameters == wanted
    rotary = rotary_of(folder)
    assert rotary.attention_scaling == pytest.approx(1 + 0.1 * math.log(4))
    assert rotary.inv_freq[0] == pytest.approx(1.0)
    assert rotary.inv_freq[-1] == pytest.approx(UNSCALED[-1].item() / 4)


@pytest.mark.parametrize(
    ("fields", "vectors", "named"),
    [
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, {}, "type=dynamic"),
        ({"rope.scaling.type": "longrope"}, {"rope_factors_long.weight": FACTORS}, "rope_factors_long.weight"),
        ({}, {"rope_factors_long.weight": FACTORS}, "rope_factors_long.weight"),
        (LINEAR, FREQUENCIES, "rope_freqs.weight"),
        (YARN | {"rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast=16"),
        ({"rope.scale_linear": 4.0}, {}, "scale_linear=4"),
        ({"rope.scaling.type": "linear"}, {}, "type=linear"),
    ],
    ids=["kind", "longrope", "tensor", "both", "part", "old", "incomplete"],
)
def test_scaling_that_is_not_known_is_refused_by_name(fields: Any, vectors: Any, named: str, tmp_path: Path) -> None:
    path = scaled_file(tmp_path, fields=fields, vectors=vectors)
    for _ in range(2):  # nothing that was half made is taken for an indexed file
        with pytest.raises(StartupError) as refused:
            locate(str(path), print)
        assert named in refused.value.message


@pytest.mark.parametrize("fields", [{}, {"rope.scaling.type": "none"}], ids=["silent", "none"])
def test_without_scaling_nothing_changes(fields: Any, tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, fields=fields)), print)
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    assert parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert torch.allclose(rotary_of(folder).inv_freq, UNSCALED)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_converted_models_keep_the_scaling(architecture: str, tmp_path: Path) -> None:
    folder = Path(locate(str(scaled_file(tmp_path, architecture, fields=LINEAR)), print))
    convert_gguf(folder, tmp_path / "converted")
    found, wanted = (AutoConfig.from_pretrained(each).rope_parameters for each in (tmp_path / "converted", folder))
    assert found == wanted
    assert "linear" in str(found)


def test_a_factor_without_a_kind_is_linear(tmp_path: Path) -> None:
    folder = locate(str(scaled_file(tmp_path, fields={"rope.scaling.factor": 2.0})), print)
    assert torch.allclose(rotary_of(folder).inv_freq, UNSCALED / 2)
