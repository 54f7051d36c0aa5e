"""GGUF files with random weights, in the block formats that quantised models have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

EOS = "<|end|>"
_FLOAT16 = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_PLAIN = {gguf.GGMLQuantizationType.F32: "f4", gguf.GGMLQuantizationType.F16: "f2"}
_Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}  # the most sensitive ones have more bits


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama or a relative of it."""

    hidden: int = 256
    inner: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 288
    tied: bool = True


def q4_k_m(name: str) -> str:
    """Return the format of a tensor in a file like those that llama.cpp calls Q4_K_M."""
    return next((kind for part, kind in _Q4_K_M.items() if part in name.split(".")), "Q4_K")


def write_gguf(
    path: Path,
    shape: Shape,
    kind: Callable[[str], str],
    architecture: str = "llama",
    seed: int = 1,
    *,
    fields: Mapping[str, str | int | float] = {},
    vectors: Mapping[str, Sequence[float]] = {},
    pre: str = "",
    added: Sequence[str] = (),
    padding: int = 0,
) -> Path:
    """Write a model with random weights of about the size that a trained model's have. `kind` is asked by tensor.

    `fields` are further ones of the architecture, `vectors` further tensors with given values, `added` tokens that a
    text has whole, `padding` rows of embeddings and head without a token.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, shape, architecture, pre or ("qwen2" if architecture == "qwen2" else "smollm"), added, padding)
    for name, value in fields.items():
        writer.add_key_value(f"{architecture}.{name}", value, gguf.GGUFValueType.get_type(value))
    random = np.random.default_rng(seed)
    tensors = [(name, "F32" if len(size) == 1 else kind(name), size) for name, size in _tensors(shape, architecture)]
    for name, chosen, size in tensors:
        writer.add_tensor_info(name, *_stored(size, gguf.GGMLQuantizationType[chosen]))
    for name, values in vectors.items():
        writer.add_tensor_info(name, *_stored((len(values),), gguf.GGMLQuantizationType.F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, chosen, size in tensors:  # one at a time: a large model does not fit into memory
        if len(size) == 1:
            around = 0.0 if name.endswith("bias") else 1.0
            writer.write_tensor_data(random.normal(around, 0.1, size).astype("f4"))
        else:
            writer.write_tensor_data(random_blocks(random, chosen, *size))
    for values in vectors.values():
        writer.write_tensor_data(np.array(values, "f4"))
    writer.close()
    return path


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    fields: Mapping[str, str | int | float],
    vectors: Mapping[str, Sequence[float]] = {},
) -> Path:
    """Write a model of transformers in float32, for an architecture that keeps the order of its weights."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    shape = Shape(config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    shape = replace(shape, head_dim=config.hidden_size // config.num_attention_heads)
    _describe(writer, replace(shape, kv_heads=config.num_key_value_heads, vocab=config.vocab_size), "", "gpt-2")
    for name, value in fields.items():  # some in place of those of `_describe`
        writer.kv_data[0].pop(f"{architecture}.{name}", None)
        writer.add_key_value(f"{architecture}.{name}", value, gguf.GGUFValueType.get_type(value))
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, weight in _as_stored(model):
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight", ".bias"))), weight.numpy().copy())
    for name, values in vectors.items():
        writer.add_tensor(name, np.array(values, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_stored(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield weights as llama.cpp's converter has them: norms from 0, the gates of experts apart, a shared gate flat."""
    from_one = model.config.model_type in ("gemma2", "nemotron")
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("shared_expert_gate.weight"):
            yield name, weight[0]
        elif model.config.model_type == "gpt2" and weight.ndim == 2 and ".h." in name:
            yield name, weight.T  # kept by inputs there
        else:
            yield name, weight + 1 if from_one and name.endswith("norm.weight") else weight


def random_blocks(random: np.random.Generator, kind: str, outputs: int, inputs: int) -> np.ndarray:
    """Return rows of random blocks, whose numbers have a deviation of about 1 / √inputs."""
    number = gguf.GGMLQuantizationType[kind]
    if number in _PLAIN:
        return (random.standard_normal((outputs, inputs), np.float32) / inputs**0.5).astype(_PLAIN[number])
    width, size = gguf.GGML_QUANT_SIZES[number]
    blocks = random.integers(256, size=(outputs, inputs // width, size), dtype=np.uint8)
    steps = {"Q4_0": 5, "Q4_1": 5, "Q8_0": 74, "Q4_K": 160, "Q5_K": 320, "Q6_K": 1400}[kind]
    scale = np.float16(1 / (steps * inputs**0.5))
    least = np.float16({"Q4_1": -7.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind, 0)) * scale
    for at in _FLOAT16[kind]:
        blocks[:, :, at : at + 2] = np.frombuffer((least if at == 2 else scale).tobytes(), np.uint8)
    return blocks.reshape(outputs, -1)


def _stored(size: tuple[int, ...], number: gguf.GGMLQuantizationType) -> tuple[Any, ...]:
    """Return what a writer must know of a tensor: its shape in bytes or numbers, their type, its bytes, its format."""
    if number in _PLAIN:
        dtype = np.dtype(_PLAIN[number])
        return size, dtype, int(np.prod(size)) * dtype.itemsize, number
    width, bytes_of_block = gguf.GGML_QUANT_SIZES[number]
    stored = (size[0], size[1] // width * bytes_of_block)
    return stored, np.dtype(np.uint8), stored[0] * stored[1], number


def _tensors(shape: Shape, architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden, shape.inner
    head_dim = shape.head_dim
    yield "token_embd.weight", (shape.vocab, hidden)
    yield "output_norm.weight", (hidden,)
    if not shape.tied:
        yield "output.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield f"{block}attn_norm.weight", (hidden,)
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{block}attn_{name}.weight", (heads * head_dim, hidden)
            if architecture == "qwen2":
                yield f"{block}attn_{name}.bias", (heads * head_dim,)
            if architecture in ("qwen3", "gemma3") and name != "v":
                yield f"{block}attn_{name}_norm.weight", (head_dim,)
        yield f"{block}attn_output.weight", (hidden, shape.heads * head_dim)
        yield f"{block}ffn_norm.weight", (hidden,)
        if architecture.startswith("gemma"):
            yield f"{block}post_attention_norm.weight", (hidden,)
            yield f"{block}post_ffw_norm.weight", (hidden,)
        for name in ("gate", "up"):
            yield f"{block}ffn_{name}.weight", (inner, hidden)
        yield f"{block}ffn_down.weight", (hidden, inner)


def _describe(
    writer: gguf.GGUFWriter,
    shape: Shape,
    architecture: str,
    pre: str = "smollm",
    added: Sequence[str] = (),
    padding: int = 0,
) -> None:
    writer.add_name("random")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(512)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"{first}{second}" for first in alphabet for second in alphabet if (first + second).isascii()]
    end = shape.vocab - padding - 1
    words = words[: end - len(alphabet) - len(added)]
    unused = [f"<|unused {index}|>" for index in range(end - len(alphabet) - len(words) - len(added))]
    pads = [f"[PAD{index}]" for index in range(end + 1, shape.vocab)]  # as llama.cpp's converter has them
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*alphabet, *words, *unused, *added, EOS, *pads])
    kinds = [1] * (len(alphabet) + len(words)) + [3] * (len(unused) + len(added) + 1) + [5] * padding
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words])
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_pad_token_id(end)
