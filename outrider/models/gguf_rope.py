"""Positions and attention scores of GGUF files, of which transformers reads a part."""

from __future__ import annotations

from typing import Any

from outrider.protocol.errors import StartupError


def add_positions(config: Any, reader: Any) -> None:
    """Complete a configuration by what a file says of positions: their rotation and its scaling."""
    fields = {name.partition(".rope.")[2]: it.contents() for name, it in reader.fields.items() if ".rope." in name}
    usual = (rope := getattr(config, "rope_parameters", None) or {}).get("full_attention") or rope
    usual["rope_theta"] = fields.get("freq_base", usual.get("rope_theta"))  # not all are read by transformers
    if "partial_rotary_factor" in usual and "dimension_count" in fields:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        usual["partial_rotary_factor"] = fields["dimension_count"] / head_dim
    if (config.model_type, config.num_hidden_layers) in {("gemma2", 46), ("gemma3_text", 62)}:  # 27B: not in files
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    scaling = {name: value for name, value in fields.items() if name.startswith("scal")}
    factors = {it.name: it.data.tolist() for it in reader.tensors if it.name.startswith(("rope_f", "blk.0.rope_f"))}
    usual.update(rope_of(scaling, factors, getattr(config, "max_position_embeddings", 0)))


def rope_of(given: dict[str, Any], factors: dict[str, list[float]], context: int) -> dict[str, Any]:
    """Return the rotary parameters that a file's scaling changes; raise StartupError for one that is not known."""
    factor, length = given.get("scaling.factor", 0.0), given.get("scaling.original_context_length")
    more = given.keys() - {"scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned"}
    match given.get("scaling.type", "linear" if factor else "none"), [*factors, *more]:
        case "none", []:
            return {}
        case "none", ["rope_freqs.weight" as each]:  # Llama 3.1 and later: a factor for each frequency, at all lengths
            same = {"short_factor": factors[each], "long_factor": factors[each], "attention_factor": 1.0}
            return {"rope_type": "longrope", "original_max_position_embeddings": context, **same}
        case "linear", [] if factor > 0:
            return {"rope_type": "linear", "factor": factor}
        case "yarn", [] if factor > 0 and length:
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    found = [*(f"{name}={value}" for name, value in given.items()), *factors]
    raise StartupError.of("rope", ", ".join(found), "none, linear, yarn or rope_freqs.weight in a GGUF file")
