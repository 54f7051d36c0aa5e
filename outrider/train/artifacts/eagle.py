"""EAGLE: one decoder layer that continues from the target's hidden states.

At position i it reads the target's final hidden state after token i and the embedding of token i + 1, and predicts the
hidden state after token i + 1. The target's head gives the next token from it. Beyond the target's states, the layer
reads its own predictions. The head is cut to the drafted ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead

METHOD = "eagle"


@dataclass(frozen=True, slots=True)
class EagleShape:
    """The dimensions of the layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int = 1
    rope_theta: float = 10_000.0
    context: int = 8192
    eps: float = 1e-5
    head_dim: int = 0  # 0: hidden / heads

    def config(self, num_ids: int) -> LlamaConfig:
        """Return the configuration of a Llama with these layers."""
        return LlamaConfig(
            vocab_size=num_ids,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim or None,
            max_position_embeddings=self.context,
            rms_norm_eps=self.eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=True,  # it reads input embeddings, never ids: only the head is used
            bos_token_id=None,
            eos_token_id=None,
        )

    @classmethod
    def like(cls, model: PreTrainedModel, layers: int = 1) -> EagleShape:
        """Return the shape of the target's own layers; of one of them where they differ, as in Gemma 3n and 4."""
        config = model.config.get_text_config()
        heads, inner = config.num_attention_heads, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
        return cls(
            hidden=config.hidden_size,
            inner=inner if isinstance(inner, int) else inner[-1],
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            layers=layers,
            rope_theta=float(theta),
            context=int(getattr(config, "max_position_embeddings", 8192)),
            head_dim=vars(config).get("head_dim") or getattr(config, "head_dim", None) or 0,
        )


class Eagle(nn.Module):
    """The EAGLE module. `ids` are the drafted ids, ascending; column i of its logits is ids[i]."""

    def __init__(self, shape: EagleShape, ids: torch.Tensor, target_weights: EmbeddingsAndHead) -> None:
        super().__init__()
        self.shape = shape
        self.ids = ids
        self.mix = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.body = LlamaForCausalLM(shape.config(len(ids)))
        head = self.body.get_output_embeddings().weight
        head.requires_grad_(requires_grad=False)
        head.copy_(target_weights.head[ids])
        self.embeddings = target_weights.embeddings

    def inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's inputs; `states[i]` is the state before `tokens[i]`, on any device.  # [..., hidden]"""
        states = states.to(self.mix.weight)
        embedded = self.embeddings[tokens].to(states.dtype)
        mixed: torch.Tensor = self.mix(torch.cat([embedded, states], dim=-1))
        return mixed

    def unroll(
        self, hidden_states: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, steps: int
    ) -> list[torch.Tensor]:
        """Return the predictions from the target's states, then from these predictions, and so on.

        `hidden_states[b, i]` is the state before `tokens[b, i]`; positions from `starts[b]` to `lengths[b]` are valid.
        In step s a position attends to the target's states up to s positions before it, and then to the predictions
        that led to it, as in drafting.  # `steps` of [batch, places, hidden]
        """
        batch, places, _ = hidden_states.shape
        at = torch.arange(places, device=hidden_states.device)
        inside = (at >= starts[:, None]) & (at < lengths[:, None])  # [batch, places]
        position_ids = at.expand(batch, places)
        cache = DynamicCache()
        states = hidden_states
        predictions: list[torch.Tensor] = []
        for step in range(steps):
            # The target's states `step` and more positions back, and one earlier prediction per step.
            first = at[:, None] - step >= at[None, :]
            seen = [first, *(at[:, None] - (step - s) == at[None, :] for s in range(1, step + 1))]
            mask = torch.cat([part & inside[:, None, :] for part in seen], dim=-1)
            # No empty rows, and no place that sees the target's state of its own instead of a prediction.
            mask |= torch.eye(places, mask.shape[-1], dtype=torch.bool, device=mask.device) & ~inside[:, :, None]
            bias = torch.zeros(mask.shape, dtype=hidden_states.dtype, device=mask.device).masked_fill_(~mask, -1e9)
            states = self.body.model(
                inputs_embeds=self.inputs(states, tokens),
                attention_mask=bias[:, None],
                position_ids=position_ids,
                past_key_values=cache,
            ).last_hidden_state
            predictions.append(states)
            states = torch.cat([hidden_states[:, :1], states[:, :-1]], dim=1)
        return predictions

    def head(self, predictions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body.lm_head(predictions)
        return logits

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, for the folder."""
        own = {f"body.{name}": weight for name, weight in self.body.model.layers.state_dict().items()}
        own |= {f"norm.{name}": weight for name, weight in self.body.model.norm.state_dict().items()}
        own["mix"] = self.mix.weight.detach()
        return {name: weight.to(torch.bfloat16) for name, weight in own.items()} | {"ids": self.ids.to(torch.int32)}

    @classmethod
    def from_weights(
        cls, shape: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target_weights: EmbeddingsAndHead
    ) -> Eagle:
        eagle = cls(EagleShape(**shape), weights["ids"].long().to(target_weights.head.device), target_weights)
        for prefix, part in (("body.", eagle.body.model.layers), ("norm.", eagle.body.model.norm)):
            known = {name.removeprefix(prefix): w.float() for name, w in weights.items() if name.startswith(prefix)}
            part.load_state_dict(known)
        with torch.no_grad():
            eagle.mix.weight.copy_(weights["mix"].float())
        return eagle
