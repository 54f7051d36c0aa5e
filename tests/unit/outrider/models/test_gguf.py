"""A GGUF file is read in place, with the weights that transformers finds in it; what changes in it is noticed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.native import NativeEngine, dequantize
from outrider.engine.transformers.engine import TransformersEngine
from outrider.models import INDEX
from outrider.models import gguf as gguf_module
from outrider.models.gguf import load_in_place
from outrider.models.hub import locate, locate_safetensors
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead, read_embeddings_and_head
from tests.gguf_files import Shape, q4_k_m, write_gguf

FORMATS = {
    "Q4_K_M": q4_k_m,
    "Q4_0": lambda name: "Q4_0",
    "Q4_1 with a head of Q8_0": lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1",
    "Q5_K": lambda name: "Q5_K",
    "half of it F16": lambda name: "F16" if "attn" in name else "Q6_K",
}
TOKENS = list(range(3, 60))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Path(os.environ.get("OUTRIDER_HOME") or Path.home() / ".cache" / "outrider") / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def options(**chosen: Any) -> EngineOptions:
    return EngineOptions(**({"device": "cpu", "dtype": "float32", "kv_tokens": 512, "threads": 1} | chosen))


def weights_of_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


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
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
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
    assert Path(folder).name == Path(locate(str(path), print)).name == blocks.info.name
    assert blocks.info == floats.info
    found, wanted = (each.extend([SessionTokens("s", TOKENS)]).logits[0] for each in (blocks, floats))
    assert torch.equal(found, wanted)


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


def test_a_file_that_is_overwritten_in_place_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    other = write_gguf(tmp_path / "other.gguf", Shape(), q4_k_m, seed=2)
    assert other.stat().st_size == path.stat().st_size
    folder = Path(locate(str(path), print))
    before = load_model(str(folder), options()).engine.info.fingerprint
    times = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for name in (path, folder):  # the same size and time of the last change: it is the same folder
        said: list[str] = []
        assert locate(str(name), said.append) == folder
        assert len(said) == (name == path), said
    assert load_model(str(folder), options()).engine.info.fingerprint != before


def test_a_file_that_was_only_touched_is_not_indexed_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    folder = Path(locate(str(path), print))
    first = (folder / INDEX).read_bytes()
    path.chmod(0o600)
    said: list[str] = []
    assert locate(str(folder), said.append) == folder
    assert said == []
    assert (folder / INDEX).read_bytes() != first  # the new state: its digest need not be computed again


def test_an_architecture_that_is_not_known_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "_ARCHITECTURES", set())
    path = write_gguf(tmp_path / "random.gguf", Shape(), q4_k_m)
    loaded = load_model(str(path), options()).engine
    assert isinstance(loaded, NativeEngine)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
