"""Weights of a GGUF file are read in place, and are those that transformers finds in it."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.native import NativeEngine, dequantize
from outrider.engine.transformers.engine import TransformersEngine
from outrider.models import in_place
from outrider.models.hub import locate, locate_safetensors
from outrider.models.in_place import load_in_place, replace_while_running
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head
from tests.gguf_files import Shape, q4_k_m, write_gguf
from tests.unit.outrider.models.gguf_models import TOKENS, options, weights_of_transformers

pytestmark = pytest.mark.usefixtures("own_home")


FORMATS = {
    "Q4_K_M": q4_k_m,
    "Q4_0": lambda name: "Q4_0",
    "Q4_1 with a head of Q8_0": lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1",
    "Q5_K": lambda name: "Q5_K",
    "half of it F16": lambda name: "F16" if "attn" in name else "Q6_K",
}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", kind) for kind in FORMATS.values()]
    + [(other, q4_k_m) for other in ("qwen2", "qwen3", "gemma2", "gemma3")],
    ids=[*FORMATS.keys(), "qwen2", "qwen3", "gemma2", "gemma3"],
)
def test_weights_are_those_that_transformers_finds(architecture: str, kind: Any, tmp_path: Path) -> None:
    shape = Shape(tied=architecture != "llama", head_dim=128 if architecture == "qwen3" else 64)
    path = write_gguf(tmp_path / "random.gguf", shape, kind, architecture)
    wanted = weights_of_transformers(path)
    folder = locate(str(path), print)
    found = load_in_place(Path(folder), dequantize, AutoConfig.from_pretrained(folder))
    assert type(found) is type(wanted)
    wanted.set_attn_implementation(found.config._attn_implementation)  # its own choice ignores caps before 5.21
    state = wanted.state_dict()
    in_blocks = 0
    for name, weight in found.named_parameters():
        rows = getattr(weight, "quantized", None)
        in_blocks += rows is not None
        for values in [weight] if rows is None else [rows.dequantize(), dequantize(rows)]:
            assert torch.equal(values, state[name]), name
    assert in_blocks > 5
    tokenizers = [
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    ]
    of_model = {token: number for token, number in tokenizers[1].get_vocab().items() if number < shape.vocab}
    assert {token: number for token, number in tokenizers[0].get_vocab().items() if number < shape.vocab} == of_model
    if not architecture.startswith("gemma"):  # these are of another kind, which the random file has not
        assert tokenizers[0].encode("the night") == tokenizers[1].encode("the night")
    with torch.inference_mode():
        ids = torch.tensor([TOKENS])
        assert torch.allclose(found(ids).logits, wanted(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kind", "smaller"),
    [("float32", "Q4_K_M", 3), ("bfloat16", "Q4_K_M", 1), ("bfloat16", "half of it F16", 1)],
)
def test_loading_writes_no_safetensors_and_gives_their_bits_and_names(
    dtype: str, kind: str, smaller: int, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), FORMATS[kind])
    blocks = load_model(str(path), options(dtype=dtype)).engine
    assert not list(tmp_path.rglob("*.safetensors"))
    folder = locate_safetensors(str(path), print)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    floats = load_model(str(folder), options(dtype=dtype)).engine
    assert isinstance(blocks, NativeEngine)
    assert isinstance(floats, NativeEngine)
    assert blocks.weight_bytes <= floats.weight_bytes / smaller
    assert Path(folder).name == Path(locate(str(path), print)).name == floats.info.name
    assert blocks.info == replace(floats.info, name="random"), "whatever the file's place and date"
    found, wanted = (each.extend([SessionTokens("s", TOKENS)]).logits[0] for each in (blocks, floats))
    assert torch.equal(found, wanted)


def test_the_file_is_unmapped_once_its_weights_are_packed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    loaded = load_model(str(path), options())
    gc.collect()
    assert isinstance(loaded.engine, NativeEngine)
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_engines_that_read_no_blocks_get_safetensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    small = load_model(str(path), options(quantization="int8")).engine
    assert isinstance(small, NativeEngine)
    assert not list(tmp_path.rglob("*.safetensors"))
    runs = load_model(str(path), options(engine="transformers")).engine
    assert isinstance(runs, TransformersEngine)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_model_that_the_kernels_refuse_is_loaded_again_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    said: list[str] = []
    monkeypatch.setattr("outrider.engine.model_spec._FAMILIES", {})
    assert isinstance(load_model(str(path), options(engine="auto"), said.append).engine, TransformersEngine)
    assert any("engine native not usable" in line for line in said)


def test_embeddings_and_head_are_read_without_the_rest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(tied=False), q4_k_m)
    wanted = EmbeddingsAndHead.of(weights_of_transformers(path))
    found = read_embeddings_and_head(str(path), print)
    assert torch.equal(found.embeddings, wanted.embeddings)
    assert torch.equal(found.head, wanted.head)
    assert found.digest == wanted.digest
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_architecture_that_is_not_known_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "ARCHITECTURES", set())
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    loaded = load_model(str(path), options()).engine
    assert isinstance(loaded, NativeEngine)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_module_has_its_own_weights_again_after_it_ran() -> None:
    """Though they were replaced twice, as by blocks of a file and by a format's rounding, and though it failed."""
    linear = torch.nn.Linear(2, 2, bias=False)
    own = linear.weight
    replace_while_running(linear, lambda _: {"weight": torch.zeros(2, 2)})
    replace_while_running(linear, lambda _: {"weight": linear.weight.detach() + 1})
    assert linear(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    assert linear.weight is own
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.ones(1, 3))
    assert linear.weight is own
