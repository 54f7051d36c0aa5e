"""Model files that cannot be read are told with what to do, not in libraries' words alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM

from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import StartupError
from outrider.testing.toy_models import make_model
from outrider.train.artifacts.embeddings_and_head import read_embeddings_and_head
from tests import gguf_files
from tests.other_user import without_rights_of_root

OPTIONS = EngineOptions(device="cpu", kv_tokens=512)
DAMAGED = "a file of it may not be read, is damaged or missing, copy or download it again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", seed=3)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_damaged_file_is_to_be_copied_again(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(StartupError, match=DAMAGED):
        load_model(str(folder), OPTIONS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "64"},
        {"num_hidden_layers": [2]},
        {"vocab_size": None},
        {"eos_token_id": "a"},
        {"model_type": ["llama"]},
        {"quantization_config": "fp8"},
    ],
)
def test_a_value_of_another_type_is_told_by_its_file_and_field(folder: Path, wrong: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    (field,) = wrong.keys() - {"model_type", "quantization_config"} or {""}  # transformers does not name these
    told = rf", its config\.json or card\.json cannot be used: .*'{field}' expected|" if field else ""
    with pytest.raises(StartupError, match=rf"cannot load model '{folder}'{told}: .*{field}.*$") as of_a_model:
        load_model(str(folder), OPTIONS)
    with pytest.raises(StartupError, match=rf"cannot read the embeddings of '{folder}': .*{field}.*$") as of_a_target:
        read_embeddings_and_head(str(folder), lambda _: None)
    assert "\n" not in f"{of_a_model.value}{of_a_target.value}"


def test_weights_that_are_not_those_of_the_config_are_told(folder: Path) -> None:
    """Transformers says: for details look at the above report."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(StartupError, match=r", its weights have other shapes than its config\.json says"):
        load_model(str(folder), OPTIONS)


def test_weights_of_another_user_are_no_missing_file() -> None:
    """Safetensors says that there is no such file."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name, "model"), seed=3)
        load_model(str(folder), OPTIONS)  # imports all: the other user may not read the modules either
        for place, mode in ((Path(name), 0o755), (folder, 0o755), (folder / "model.safetensors", 0)):
            place.chmod(mode)
        with without_rights_of_root(), pytest.raises(StartupError, match=DAMAGED):
            load_model(str(folder), OPTIONS)


def test_a_folder_without_a_tokenizer_is_told_so(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartupError, match=r"it has no tokenizer, copy its tokenizer\.json too"):
        load_model(str(folder), OPTIONS)


def test_a_damaged_gguf_file_is_to_be_copied_again(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(StartupError, match=r"model\.gguf cannot be read as a GGUF file, copy or download it again"):
        load_model(str(tmp_path / "model.gguf"), OPTIONS)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_weights_in_a_format_that_needs_a_package_are_refused_by_its_name(folder: Path, method: str) -> None:
    """None of the packages is installed with the extra `models`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=rf"quantised by {method}, must be not quantised, .*--engine vllm"):
        load_model(str(folder), OPTIONS)


def test_bloom_is_refused_by_the_reason_in_a_gguf_file_too(tmp_path: Path) -> None:
    """Its configuration names no longest text, which was taken for a file that cannot be read."""
    config = BloomConfig(
        vocab_size=288, hidden_size=64, n_layer=2, n_head=2, intermediate_size=256, num_key_value_heads=2
    )
    body = BloomForCausalLM(config).transformer  # whose names are those in gguf's list
    path = gguf_files.write_model(tmp_path / "bloom.gguf", body, "bloom", {"attention.layer_norm_epsilon": 1e-5})
    with pytest.raises(StartupError, match="its attention does not go through transformers' attention interface"):
        load_model(str(path), OPTIONS)
