"""Scaling of rotary positions in GGUF files, which transformers does not read."""

from __future__ import annotations

from typing import Any

import gguf

from outrider.protocol.errors import StartupError

_SCALING = ".rope.scal"


def rope_of(reader: gguf.GGUFReader, config: Any) -> dict[str, Any]:
    """Return the rotary parameters that a file's scaling changes; raise StartupError for one that is not known."""
    fields = {name: field.contents() for name, field in reader.fields.items() if _SCALING in name}
    given = {name.partition(".rope.")[2]: value for name, value in fields.items()}
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
