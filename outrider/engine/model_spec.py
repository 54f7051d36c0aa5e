"""Model specs: the layers of a decoder of a common family, taken from its transformers model.

One structure covers the families: norm, attention, norm, feed-forward, with a few switches. An engine over a spec must
be compared with the model before it serves (`loading.selection` does). If a release changes a family, transformers runs
it instead, slower and correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.models.in_place import QuantizedRows, quantized_rows

NormKind = Literal["rms", "layer"]
Cosines = tuple[torch.Tensor, torch.Tensor]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
_ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")


class UnsupportedModel(Exception):
    """The model has no spec: its family is not covered, or it is not built as known."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map."""

    weight: torch.Tensor  # [outputs, inputs]; on the meta device where `quantized` has it
    bias: torch.Tensor | None = None
    quantized: tuple[QuantizedRows, ...] = ()  # one after the other


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension."""

    kind: NormKind
    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer. Absent norms are None."""

    qkv: Linear  # all queries, all keys, all values
    out: Linear
    up: Linear  # gate and up one after the other when gated
    down: Linear
    scale: float
    attention_in: Norm | None
    mlp_in: Norm | None
    attention_out: Norm | None = None
    mlp_out: Norm | None = None
    query: Norm | None = None
    key: Norm | None = None
    window: int | None = None
    rope: int | None = None  # index of the spec's rotation


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The layers of a decoder, its embeddings, rotations, final norm and head."""

    layers: tuple[Layer, ...]
    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids, positions → [tokens, hidden]
    rotations: tuple[Callable[[torch.Tensor], Cosines], ...]  # positions → cos and sin [tokens, rotated]
    final: Norm
    head: Linear
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    gated: bool = False
    parallel: bool = False  # attention and feed-forward read the same input
    softcap: float = 0.0
    logit_softcap: float = 0.0
    table: torch.nn.Module | None = None  # the embeddings, where `embed` gives its rows as they are

    @property
    def hidden(self) -> int:
        """Return the width of hidden states."""
        return int(self.final.weight.shape[0])

    @property
    def rotated(self) -> int:
        """Return the number of dimensions of a head that are rotated."""
        return int(self.rotations[0](torch.zeros(1, dtype=torch.int64))[0].shape[-1]) if self.rotations else 0

    @property
    def inner(self) -> int:
        """Return the inner width of the feed-forward part."""
        return int(self.layers[0].down.weight.shape[1])


def build_spec(model: PreTrainedModel) -> ModelSpec:
    """Return a model's spec. Raises UnsupportedModel for one that the structure does not cover."""
    kind = model.config.get_text_config().model_type
    if kind not in _FAMILIES:
        raise UnsupportedModel(f"no model spec for models of type {kind!r}")
    try:
        return _FAMILIES[kind](model)
    except (AttributeError, KeyError, TypeError) as error:  # another release of transformers, another build of it
        raise UnsupportedModel(f"this {kind!r} model is not built as known: {error}") from error


def _llama(model: Any) -> ModelSpec:
    """Return the spec of Llama, Mistral, Qwen 2 and 3, Phi-3 or Gemma: RMS norms, rotation, a gated feed-forward."""
    config, body = model.config.get_text_config(), model.get_decoder()  # of a model that sees images, too
    gemma = config.model_type.startswith("gemma")
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    rotations = _rotations(body.rotary_emb, config)
    layers = []
    for index, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        wrapped = hasattr(layer, "pre_feedforward_layernorm")
        queries, keys = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        layers.append(
            Layer(
                qkv=_joined(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
                out=_linear(attention.o_proj),
                up=_joined(mlp, "gate_up_proj", "gate_proj", "up_proj"),
                down=_linear(mlp.down_proj),
                scale=float(attention.scaling),
                attention_in=_rms(layer.input_layernorm, gemma),
                attention_out=_rms(layer.post_attention_layernorm, gemma) if wrapped else None,
                mlp_in=_rms(layer.pre_feedforward_layernorm if wrapped else layer.post_attention_layernorm, gemma),
                mlp_out=_rms(layer.post_feedforward_layernorm, gemma) if wrapped else None,
                query=_rms(queries, gemma) if queries is not None else None,
                key=_rms(keys, gemma) if keys is not None else None,
                window=window if types is None or types[index] == "sliding_attention" else None,
                rope=0 if len(rotations) == 1 else ["full_attention", "sliding_attention"].index(attention.layer_type),
            )
        )

    return _spec(
        model,
        layers,
        _rms(body.norm, gemma),
        getattr(config, "hidden_activation", None) or config.hidden_act,
        rotations=rotations,
        gated=True,
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        table=None if gemma else body.embed_tokens,
    )


def _gpt2(model: Any) -> ModelSpec:
    body = model.transformer
    layers = [
        Layer(
            qkv=_linear(block.attn.c_attn),
            out=_linear(block.attn.c_proj),
            up=_linear(block.mlp.c_fc),
            down=_linear(block.mlp.c_proj),
            scale=float(block.attn.scaling),
            attention_in=_layer_norm(block.ln_1),
            mlp_in=_layer_norm(block.ln_2),
        )
        for block in body.h
    ]
    embed = lambda ids, positions: body.wte(ids) + body.wpe(positions)  # noqa: E731
    return _spec(model, layers, _layer_norm(body.ln_f), model.config.activation_function, embed=embed, rotations=())


def _gpt_neox(model: Any) -> ModelSpec:
    config, body = model.config, model.gpt_neox
    head_dim = config.hidden_size // config.num_attention_heads
    layers = [
        Layer(
            qkv=_sorted_by_kind(_linear(layer.attention.query_key_value), config.num_attention_heads, head_dim),
            out=_linear(layer.attention.dense),
            up=_linear(layer.mlp.dense_h_to_4h),
            down=_linear(layer.mlp.dense_4h_to_h),
            scale=float(layer.attention.scaling),
            attention_in=_layer_norm(layer.input_layernorm),
            mlp_in=_layer_norm(layer.post_attention_layernorm),
            rope=0,
        )
        for layer in body.layers
    ]
    others = {"rotations": _rotations(body.rotary_emb, config), "parallel": bool(config.use_parallel_residual)}
    return _spec(model, layers, _layer_norm(body.final_layer_norm), config.hidden_act, **others)


def _phi(model: Any) -> ModelSpec:
    config, body = model.config, model.model
    layers = [
        Layer(
            qkv=_joined(layer.self_attn, "qkv_proj", "q_proj", "k_proj", "v_proj"),
            out=_linear(layer.self_attn.dense),
            up=_linear(layer.mlp.fc1),
            down=_linear(layer.mlp.fc2),
            scale=float(layer.self_attn.scaling),
            attention_in=_layer_norm(layer.input_layernorm),
            mlp_in=None,
            query=_layer_norm(layer.self_attn.q_layernorm) if config.qk_layernorm else None,
            key=_layer_norm(layer.self_attn.k_layernorm) if config.qk_layernorm else None,
            rope=0,
        )
        for layer in body.layers
    ]
    others = {"rotations": _rotations(body.rotary_emb, config), "parallel": True}
    return _spec(model, layers, _layer_norm(body.final_layernorm), config.hidden_act, **others)


def _spec(model: Any, layers: Sequence[Layer], final: Norm, activation: str, **others: Any) -> ModelSpec:
    """Return the spec of a model with these layers; `others` are its fields that families differ in."""
    config, embeddings = model.config.get_text_config(), model.get_input_embeddings()
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r}")
    return ModelSpec(
        layers=tuple(layers),
        final=final,
        head=_linear(model.get_output_embeddings()),
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=layers[0].out.weight.shape[1] // config.num_attention_heads,
        activation=_ACTIVATIONS[activation],
        **{"embed": lambda ids, _: embeddings(ids)} | others,
    )


_FAMILIES: dict[str, Callable[[Any], ModelSpec]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"), _llama),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
}


def head_format(weights: str) -> str:
    """Return the format of the head's weights where all others have this one: four bits are too few."""
    return "int8" if weights == "int4" else weights


def _linear(module: Any) -> Linear:
    weight = module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()
    bias = getattr(module, "bias", None)
    rows = quantized_rows(module)
    return Linear(weight, None if bias is None else bias.detach(), () if rows is None else (rows,))


def _joined(parent: Any, whole: str, *parts: str) -> Linear:
    """Return projections of the same input as one. The model's weights become views of it, so memory is shared."""
    if hasattr(parent, whole):
        return _linear(getattr(parent, whole))
    modules = [getattr(parent, part) for part in parts]
    linears = [_linear(module) for module in modules]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        raise UnsupportedModel("some of the joined projections have a bias and some have none")
    bias = torch.cat(biases) if biases else None
    quantized = [rows for linear in linears for rows in linear.quantized]
    if len(quantized) == len(linears):
        weight = torch.empty(sum(len(each.stored) for each in quantized), quantized[0].inputs, device="meta")
        return Linear(weight, bias, tuple(quantized))
    with torch.inference_mode(False), torch.no_grad():  # the model stays trainable
        plain = [it.quantized[0].dequantize().to(it.weight.dtype) if it.quantized else it.weight for it in linears]
        weight = torch.cat(plain)
    parts_of = torch.split_with_sizes(weight, [len(linear.weight) for linear in linears])
    for module, part in zip(modules, parts_of, strict=True):
        module.weight.data = part
    return Linear(weight, bias)


def _sorted_by_kind(linear: Linear, heads: int, dim: int) -> Linear:
    """Reorder query, key and value of each head to all queries, all keys, all values."""

    def sort(weight: torch.Tensor) -> torch.Tensor:
        return weight.reshape(heads, 3, dim, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)

    return Linear(sort(linear.weight), None if linear.bias is None else sort(linear.bias))


def _rms(module: Any, from_one: bool) -> Norm:
    """Return an RMS norm. With `from_one` (the Gemmas), the stored weight is its distance from 1."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = module.weight.detach().to(torch.float32, copy=True)  # a view would keep the model's file mapped
    return Norm("rms", weight + 1.0 if from_one else weight, float(eps))


def _layer_norm(module: Any) -> Norm:
    bias = None if module.bias is None else module.bias.detach().to(torch.float32, copy=True)
    return Norm("layer", module.weight.detach().to(torch.float32, copy=True), float(module.eps), bias)


def _rotations(rotary: Any, config: Any) -> tuple[Callable[[torch.Tensor], Cosines], ...]:
    """Return the model's own rotations with their scaling; Gemma 3 has one per kind of layer."""
    like = torch.empty(0)

    def rotate(kind: dict[str, str], positions: torch.Tensor) -> Cosines:
        cos, sin = rotary(like.to(positions.device), positions[None], **kind)
        return cos[0], sin[0]

    types = sorted(set(config.layer_types)) if config.model_type == "gemma3_text" else []
    rotations = tuple(partial(rotate, {"layer_type": kind}) for kind in types) or (partial(rotate, {}),)
    last = int(config.max_position_embeddings) - 1
    for each in rotations:
        if not torch.equal(each(torch.tensor([1]))[0][0], each(torch.tensor([1, last]))[0][0]):
            # A session's keys would depend on the other sessions of the step.
            raise UnsupportedModel("its rotation changes with the length of the context")
    return rotations
