"""Model sources for from_pretrained, the conversion of GGUF files to safetensors, and the blocks of such files.

A converted folder keeps the GGUF file. An index names the weights whose blocks dequantise to exactly what was
converted. An engine may read those blocks in place of the float32 weights.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

_FILE, INDEX = "weights.gguf", "gguf.json"
_KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a weight in the blocks of a GGUF file."""

    kind: int  # number of the block format in ggml
    rows: torch.Tensor  # [outputs, bytes of a row]
    inputs: int

    def dequantize(self) -> torch.Tensor:
        """Return the rows as float32."""
        return torch.from_numpy(gguf.quants.dequantize(self.rows.numpy(), gguf.GGMLQuantizationType(self.kind)))


def pretrained_source(path: Path | str) -> dict[str, Any]:
    """Return the arguments of from_pretrained for a directory, a GGUF file or a hub id."""
    if isinstance(path, Path) and path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path), "trust_remote_code": False}


def convert_gguf(source: Path, into: Path) -> None:
    """Dequantise a GGUF file and save it as safetensors with its tokenizer, so that loading takes seconds."""
    options = pretrained_source(source)
    quantised = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers refuses to save a model that was loaded as quantised.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(into)
    for weights in into.glob("*.safetensors"):
        weights.chmod(0o644)  # services may run as other users
    AutoTokenizer.from_pretrained(**options).save_pretrained(into)
    index_gguf(source, into)


def index_gguf(source: Path, folder: Path) -> None:
    """Put a GGUF file into the folder it was converted to, with an index of its blocks."""
    (folder / _FILE).unlink(missing_ok=True)
    try:
        os.link(source, folder / _FILE)
    except OSError:  # another file system
        (folder / _FILE).symlink_to(source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    reader = gguf.GGUFReader(source)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = architectures[reader.fields["general.architecture"].contents()]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    data, index = _mapped(folder), {}
    for name, weight in model.named_parameters():
        tensor = tensors.get(names.get_name(name, try_suffixes=(".weight",)) or "")
        if tensor is None or tensor.tensor_type not in _KINDS:
            continue
        place: dict[str, Any] = {"kind": tensor.tensor_type, "start": tensor.data_offset, "size": tensor.n_bytes}
        for heads in {0, model.config.num_attention_heads, getattr(model.config, "num_key_value_heads", 0)}:
            entry = {key: int(value) for key, value in (place | {"heads": heads}).items()}
            if len(weight) % max(1, 2 * heads) == 0 and torch.equal(_rows(data, weight, entry).dequantize(), weight):
                index[name] = entry
    (folder / INDEX).write_text(json.dumps(index))


def attach_rows(model: PreTrainedModel, folder: Path) -> None:
    """Attach the blocks of its GGUF file, mapped into memory, to each weight of a converted model that has them."""
    if not (folder / INDEX).is_file() or not (folder / _FILE).is_file():
        return
    data, index = _mapped(folder), json.loads((folder / INDEX).read_text())
    for name, weight in model.named_parameters():
        if name in index:
            weight.quantized = _rows(data, weight, index[name])


def quantized_rows(module: Any) -> QuantizedRows | None:
    """Return the blocks of a module's weight."""
    return getattr(module.weight, "quantized", None)


def detach_rows(model: PreTrainedModel, dequantize: Callable[[QuantizedRows, torch.Tensor], torch.Tensor]) -> None:
    """Unmap the file. Embeddings that have rows keep a copy of them, and dequantise those they are asked for."""
    embeddings: Any = model.get_input_embeddings()
    mapped = quantized_rows(embeddings)
    for weight in model.parameters():
        weight.__dict__.pop("quantized", None)
    if mapped is None:
        return
    quantized = replace(mapped, rows=mapped.rows.clone())

    def look_up(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        module.weight.data = dequantize(quantized, inputs[0].reshape(-1))
        return (torch.arange(inputs[0].numel()).view(inputs[0].shape),)

    embeddings.register_forward_pre_hook(look_up)
    embeddings.weight.data = torch.empty(0)
    embeddings.padding_idx = None  # a gradient's business; it counts rows of the dropped weight


def _mapped(folder: Path) -> torch.Tensor:
    with (folder / _FILE).open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _rows(data: torch.Tensor, weight: torch.Tensor, entry: Mapping[str, int]) -> QuantizedRows:
    """Return the rows of `weight` in a file's bytes. With `heads`, llama.cpp interleaved the halves of each head."""
    rows = data[entry["start"] : entry["start"] + entry["size"]].view(len(weight), -1)
    if entry["heads"]:
        rows = rows.view(entry["heads"], -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    return QuantizedRows(entry["kind"], rows, weight.shape[1])
