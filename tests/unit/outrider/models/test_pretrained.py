"""Models that transformers loads whole: with all weights of their files, as the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine import SessionTokens
from outrider.engine.loading import loader
from outrider.engine.loading.options import EngineOptions
from outrider.models import GGUF
from outrider.models.gguf import convert_gguf
from outrider.models.hub import locate
from outrider.models.pretrained import load_whole
from outrider.protocol.errors import StartupError
from tests.architectures import save, tiny_model
from tests.gguf_files import write_gguf
from tests.unit.outrider.models.gguf_models import SMALL, TOKENS, without

pytestmark = pytest.mark.usefixtures("own_home")

BLOCK = 32


def test_what_transformers_reads_of_a_file_is_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of other architectures are found by it alone."""
    folder = Path(locate(str(write_gguf(tmp_path / "whole.gguf", SMALL, lambda _: "Q8_0")), print))
    without("ffn_down", monkeypatch)
    (folder / GGUF).unlink()
    write_gguf(folder / GGUF, SMALL, lambda _: "Q8_0")
    with pytest.raises(StartupError, match=r"without model\.layers\.0\.mlp\.down_proj"):
        convert_gguf(folder, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def in_fp8(folder: Path, family: str) -> tuple[str, str]:
    """Make a model with its layers in fp8, as DeepSeek and Qwen publish theirs, and a float32 copy."""
    model, copy = tiny_model(family, {}).bfloat16(), folder / "copy"
    save(model, folder)
    state = load_file(folder / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        stored[name], state[name] = weight, weight.float()
        if name.endswith("proj.weight"):
            blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [row, inside, column, inside]
            scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            rounded = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = rounded.view(weight.shape), scales[:, 0, :, 0].contiguous()
            state[name] = (rounded.float() * scales).view(weight.shape)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    save(model.float(), copy)
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    return str(folder), str(copy)


@pytest.mark.parametrize(("family", "engine"), [("qwen3", "native"), ("qwen3", "transformers"), ("glm4", "auto")])
def test_weights_in_fp8_become_the_numbers_that_they_stand_for(family: str, engine: str, tmp_path: Path) -> None:
    found, wanted = (
        loader.load_model(folder, EngineOptions(device="cpu", kv_tokens=512, threads=1, engine=engine)).engine
        for folder in in_fp8(tmp_path, family)
    )
    logits = [engine.extend([SessionTokens("s", TOKENS)]).logits[0].clone() for engine in (found, wanted)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_fp8_on_a_cpu_beside_a_gpu_becomes_the_same_model(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU in the machine, transformers kept the layers in fp8, which no CPU runs."""
    folder, _ = in_fp8(tmp_path, "qwen3")
    options = EngineOptions(device="cpu", kv_tokens=512, threads=1, engine=engine)
    alone = loader.load_model(folder, options).engine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    beside = loader.load_model(folder, options).engine
    logits = [engine.extend([SessionTokens("s", TOKENS)]).logits[0].clone() for engine in (alone, beside)]
    assert torch.equal(*logits)
    assert alone.info == beside.info
    trained = load_whole("as training and benchmarks load it", folder)
    assert {weight.dtype for weight in trained.parameters()} == {torch.float32}
