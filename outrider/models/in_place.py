"""Weights that stay in their files: blocks of a GGUF file, or bfloat16 of safetensors, mapped into memory.

Of GGUF files the folder's index says where each weight is. Models of other architectures are loaded from safetensors.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import cached_file

from outrider.models import GGUF, INDEX
from outrider.models.hub import read_index
from outrider.models.pretrained import empty_model, unread_beside

_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_IN_PLACE = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16")]
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # ggml's formats without blocks
_LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"}  # in safetensors
ARCHITECTURES = {"llama", "qwen2", "qwen3", "gemma2", "gemma3"}  # their weights are found without transformers


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a weight in the blocks of a GGUF file."""

    kind: int  # number of the block format in ggml
    stored: torch.Tensor  # [outputs, bytes of a row]
    inputs: int
    heads: int = 0  # llama.cpp interleaved the halves of each of so many heads
    file: mmap.mmap | None = None  # where `stored` is mapped from

    @property
    def rows(self) -> torch.Tensor:
        """Return the rows in the model's order; interleaved ones are copied."""
        if not self.heads:
            return self.stored
        return self.stored.view(self.heads, -1, 2, *self.stored.shape[1:]).transpose(1, 2).reshape(self.stored.shape)

    def dequantize(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows as float32; None: all."""
        rows = self.rows if ids is None else self.rows[ids]
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(self.kind)))

    def sample(self, stride: int) -> torch.Tensor:
        """Return every so many-th number as float32; only its block is dequantised."""
        width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.kind)]
        at = torch.arange(0, len(self.stored) * self.inputs, stride)
        blocks = QuantizedRows(self.kind, self.rows.reshape(-1, size)[at // width], width)
        return blocks.dequantize()[torch.arange(len(at)), at % width]


Dequantize = Callable[[QuantizedRows, torch.Tensor | None], torch.Tensor]


def rows_in_file(folder: Path | str, model: PreTrainedModel) -> dict[str, QuantizedRows]:
    """Return a model's weights in the mapped GGUF file of a folder; none where they cannot be read in place."""
    index = read_index(folder)
    if index.get("architecture") not in ARCHITECTURES:
        return {}
    with (Path(folder) / GGUF).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    config, names = model.config, tensor_names(index["architecture"], model.config)
    interleaved = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    rows = {}
    for name, weight in model.named_parameters():
        stored_as = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind, start, inputs, *outputs = index["tensors"].get(stored_as, (0, 0, 0))
        if [*outputs, inputs] != list(weight.shape):
            return {}
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        stored = data[start : start + weight.numel() // block * size].view(*outputs, -1)
        heads = interleaved.get(str(stored_as).split(".")[-2], 0) if index["architecture"] == "llama" else 0
        rows[name] = QuantizedRows(kind, stored, inputs, heads, mapped)
    return rows


def rows_in_safetensors(folder: Path | str, model: PreTrainedModel) -> dict[str, QuantizedRows]:
    """Return a model's weights in the mapped safetensors of a folder, if all are there by name, and are bfloat16."""
    rows: dict[str, QuantizedRows] = {}
    files: dict[str, Any] = {}  # by weight
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
    paths = [single] if single.is_file() else sorted({Path(folder) / name for name in shards})
    if not all(path.is_file() for path in paths):  # a download goes on, or was interrupted
        return {}
    for path in paths:
        opened: Any = safe_open(path, framework="pt")
        files |= dict.fromkeys(opened.keys(), opened)
    wanted = dict(model.named_parameters())
    if unread_beside(files, wanted):
        return {}
    if _TIED[0] not in wanted and files.keys() >= set(_TIED):
        head, embeddings = (files[name].get_tensor(name) for name in _TIED)
        if head.dtype != embeddings.dtype or not torch.equal(head, embeddings):
            return {}  # tied by name only: they stay apart in transformers
    for name, weight in wanted.items():
        stored = files[name].get_tensor(name) if name in files and model.config.model_type in _LIKE_LLAMA else None
        if stored is None or stored.dtype != torch.bfloat16 or stored.shape != weight.shape:
            return {}
        rows[name] = rows_of(stored)
    return rows


def load_in_place(
    folder: Path | str, dequantize: Dequantize, config: Any, dtype: torch.dtype = torch.float32
) -> PreTrainedModel | None:
    """Load a model whose large weights stay in its files, as blocks or bfloat16; None where they cannot be read there.

    Each module dequantises its weight while it runs. In its place is NaN of the same shape, which takes no memory.
    """
    if not Path(folder).is_dir():  # a hub id
        folder = Path(str(cached_file(str(folder), "config.json", local_files_only=True))).parent
    empty, nothing = empty_model(config, folder), torch.full((1,), torch.nan, dtype=dtype)
    if not (rows := rows_in_file(folder, empty) or rows_in_safetensors(folder, empty)):
        return None
    stay = {name for name, each in rows.items() if each.kind in _IN_PLACE and each.stored.ndim == 2}
    from_one = config.model_type.startswith("gemma") and (Path(folder) / INDEX).is_file()
    state = {name: nothing.expand(len(rows[name].stored), rows[name].inputs) for name in stay}
    for name in rows.keys() - stay:
        state[name] = rows[name].dequantize() - float(from_one and name.endswith("norm.weight"))
    loading = {"config": config, "state_dict": state, "dtype": dtype, "attn_implementation": "eager"}
    model: PreTrainedModel = type(empty).from_pretrained(None, **loading)
    model.generation_config = empty.generation_config
    for name in stay:
        model.get_parameter(name).quantized = rows[name]
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and (quantized := quantized_rows(module)):
            _dequantize_while_running(module, quantized, dequantize)
    return model


def _dequantize_while_running(module: Any, rows: QuantizedRows, dequantize: Dequantize) -> None:
    dtype = module.weight.dtype
    if not isinstance(module, nn.Embedding):
        module.row_hooks = replace_while_running(module, lambda _: {"weight": dequantize(rows, None).to(dtype)})
        return
    number = lambda _, x: (torch.arange(x[0].numel()).view(x[0].shape),)  # noqa: E731 - of the dequantised rows
    hooks = replace_while_running(module, lambda x: {"weight": dequantize(rows, x[0].reshape(-1)).to(dtype)})
    module.__dict__["row_hooks"] = [*hooks, module.register_forward_pre_hook(number)]
    module.padding_idx = None  # a gradient's business; it counts rows of the whole weight


def replace_while_running(module: nn.Module, make: Callable[[Any], dict[str, torch.Tensor]]) -> list[RemovableHandle]:
    """Replace parameters of a module while it runs, by what `make` returns for its inputs. Return the hooks."""
    own: dict[str, nn.Parameter] = {}

    def put(_: nn.Module, inputs: Any) -> None:
        own.update(module.named_parameters(recurse=False))
        with torch.inference_mode(False), torch.no_grad():  # a rank's share cannot be a parameter otherwise
            for name, value in make(inputs).items():
                setattr(module, name, nn.Parameter(value, requires_grad=False))

    def restore(*_: Any) -> None:
        while own:  # keeps none of them
            setattr(module, *own.popitem())

    # The last one that replaced restores first.
    restoring = module.register_forward_hook(restore, prepend=True, always_call=True)
    return [module.register_forward_pre_hook(put), restoring]


def rows_of(weight: torch.Tensor) -> QuantizedRows:
    """Return a weight in numbers as rows of a file would be."""
    return QuantizedRows(NUMBERS[weight.dtype], weight.contiguous().view(torch.uint8), weight.shape[-1])


def quantized_rows(module: Any) -> QuantizedRows | None:
    """Return the blocks of a module's weight."""
    return getattr(module.weight, "quantized", None)


def detach_rows(model: PreTrainedModel, dequantize: Dequantize) -> None:
    """Unmap the file. Embeddings that have rows keep a copy of them, and dequantise those they are asked for."""
    embeddings: Any = model.get_input_embeddings()
    mapped = quantized_rows(embeddings)
    for module in model.modules():
        for hook in module.__dict__.pop("row_hooks", ()):
            hook.remove()
    for weight in model.parameters():
        weight.__dict__.pop("quantized", None)
    if mapped is not None:
        kept = replace(mapped, stored=mapped.stored.clone(), file=None)
        embeddings.rows = kept if embeddings.weight.dtype == torch.float32 else None
        _dequantize_while_running(embeddings, kept, dequantize)


def tensor_names(architecture: str, config: Any) -> gguf.TensorNameMap:
    """Return what names of weights are called in GGUF files of an architecture."""
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
