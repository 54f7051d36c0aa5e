"""A target's embeddings and head, read without the rest: all that a drafter on another machine needs of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from outrider.models.hub import locate
from outrider.models.in_place import rows_in_file
from outrider.models.pretrained import empty_model
from outrider.protocol.errors import StartupError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLED = 256


@dataclass(frozen=True, slots=True)
class EmbeddingsAndHead:
    """The input and output matrices of a target."""

    embeddings: torch.Tensor  # [vocab, hidden]
    head: torch.Tensor  # [vocab, hidden], with the scale of the logits
    head_bias: torch.Tensor | None
    softcap: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> EmbeddingsAndHead:
        """Return those of a loaded model."""
        out: Any = model.get_output_embeddings()
        head, bias = _scaled(out.weight.detach(), model.config), None if out.bias is None else out.bias.detach()
        return cls(model.get_input_embeddings().weight.detach(), head, bias, _softcap(model.config))

    def on(self, device: torch.device) -> EmbeddingsAndHead:
        """Return them on a device."""
        bias = None if self.head_bias is None else self.head_bias.to(device)
        return replace(self, embeddings=self.embeddings.to(device), head=self.head.to(device), head_bias=bias)

    def cut(self, ids: torch.Tensor) -> EmbeddingsAndHead:
        """Return them with a head for some ids alone, in bfloat16."""
        bias = None if self.head_bias is None else self.head_bias[ids]
        return replace(self, head=self.head[ids].to(torch.bfloat16), head_bias=bias)

    @property
    def digest(self) -> str:
        """Return a digest that does not depend on the number format."""
        digest = hashlib.sha256()
        for weight in (self.embeddings, self.head):
            flat = weight.reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLED)].to(torch.bfloat16).view(torch.int16)
            digest.update(f"{tuple(weight.shape)}".encode() + sample.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    @property
    def hidden(self) -> int:
        """Return the width of hidden states."""
        return int(self.head.shape[1])

    def probs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the target's distribution over the ids of the head.  # [rows, ids]"""
        return torch.softmax(self.logits(hidden_states, slice(None)).float(), dim=-1)

    def logits(self, hidden_states: torch.Tensor, ids: torch.Tensor | slice) -> torch.Tensor:
        """Return the target's logits for some ids, from its final hidden states.  # [rows, ids]"""
        logits = hidden_states @ self.head[ids].T
        if self.head_bias is not None:
            logits = logits + self.head_bias[ids]
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def read_embeddings_and_head(target: str, progress: Callable[[str], None]) -> EmbeddingsAndHead:
    """Read them from a target's files, without the rest."""
    path = locate(target, progress)
    progress("reading the target's embeddings")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model = empty_model(config)
        embeddings, head, bias = names = _names(model)
        rows = rows_in_file(path, model)
        read = {name: rows[name].dequantize() if rows else _read(path, name) for name in names if name}
    except Exception as error:  # of transformers for any value of the configuration, too
        message = f"cannot read the embeddings of {target!r}: {' '.join(str(error).split())}"
        raise StartupError(message, field="target", value=target, limit="safetensors") from error
    head_bias = None if bias is None else read[bias].float()
    return EmbeddingsAndHead(read[embeddings].float(), _scaled(read[head].float(), config), head_bias, _softcap(config))


def _names(model: PreTrainedModel) -> tuple[str, str, str | None]:
    """Return the names of embeddings, head and bias in the checkpoint."""
    out: Any = model.get_output_embeddings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = names[id(model.get_input_embeddings().weight)]
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", model.config.tie_word_embeddings)
    return embeddings, embeddings if tied else names[id(out.weight)], None if out.bias is None else names[id(out.bias)]


def _read(path: Path | str, name: str) -> torch.Tensor:
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False)
    places = {} if index is None else json.loads(Path(index).read_text())["weight_map"]
    with safe_open(cached_file(path, places.get(_stored(name, places), _SINGLE)), "pt") as weights:
        weight: torch.Tensor = weights.get_tensor(_stored(name, weights.keys()))
        return weight


def _stored(name: str, stored: Collection[str]) -> str:
    """Return a name as a checkpoint has it: some omit the body's prefix, or have another, as models that see images."""
    last = "." + ".".join(name.split(".")[-2:])
    return name if name in stored else next((it for it in stored if f".{it}".endswith(last)), name)


def _softcap(config: Any) -> float:
    return float(getattr(config.get_text_config(), "final_logit_softcapping", None) or 0.0)


def _scaled(head: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a head that gives the logits as Cohere, Granite, Falcon-H1 and others scale them."""
    text = config.get_text_config()
    scale, divisor = (getattr(text, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    scale *= getattr(text, "lm_head_multiplier", None) or 1.0
    scale *= divisor if text.model_type.startswith("hyperclovax") else 1.0 / divisor
    return head if scale == 1.0 else head * scale
