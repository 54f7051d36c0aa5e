"""Scaling of rotary positions and attention scores in GGUF files, which transformers does not read."""

from __future__ import annotations

from typing import Any

import gguf

from outrider.protocol.errors import StartupError


def add_scaling(config: Any, reader: gguf.GGUFReader) -> dict[str, Any]:
    """Complete a configuration by a file's scaling; return what was changed."""
    rope, usual = rope_of(reader, config), getattr(config, "rope_parameters", None) or {}
    (usual.get("full_attention") or usual).update(rope)
    if (config.model_type, config.num_hidden_layers) in {("gemma2", 46), ("gemma3_text", 62)}:  # 27B: not in files
        rope["query_pre_attn_scalar"] = config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    return rope


def rope_of(reader: gguf.GGUFReader, config: Any) -> dict[str, Any]:
    """Return the rotary parameters that a file's scaling changes; raise StartupError for one that is not known."""
    fields = {name.partition(".rope.")[2]: field for name, field in reader.fields.items()}
    given = {name: field.contents() for name, field in fields.items() if name.startswith("scal")}
    factors = {it.name: it.data.tolist() for it in reader.tensors if it.name.startswith(("rope_f", "blk.0.rope_f"))}
    factor, length = given.get("scaling.factor", 0.0), given.get("scaling.original_context_length")
    more = given.keys() - {"scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned"}
    match given.get("scaling.type", "linear" if factor else "none"), [*factors, *more]:
        case "none", []:
            return {}
        case "none", ["rope_freqs.weight"]:  # Llama 3.1 and later: a factor for each frequency, at all lengths
            (each,) = factors.values()
            same = {"rope_type": "longrope", "attention_factor": 1.0, "short_factor": each, "long_factor": each}
            return {**same, "original_max_position_embeddings": config.max_position_embeddings}
        case "linear", [] if factor > 0:
            return {"rope_type": "linear", "factor": factor}
        case "yarn", [] if factor > 0 and length:
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    found = ", ".join([*(f"{name}={value}" for name, value in given.items()), *factors])
    raise StartupError.of("rope", found, "none, linear, yarn or rope_freqs.weight in a GGUF file")
