"""Modules that predict further tokens (MTP): in the files of their targets, or apart in the layout of `speculators`.

Each side of a row has a norm, and one decoder layer reads the two together. A chain runs the first module again and
again. The parameters have the names of MiMo's and of `speculators`; others are renamed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from drafter.published.checkpoint_config import MAX_LAYERS, CheckpointConfig
from drafter.published.layers import GLM, QWEN_NEXT, DecoderShape, DraftLayer, linear
from drafter.published.module import EMBEDDINGS, HEAD, PublishedModule, TargetNeeds, vocab_of
from drafter.published.mtp.experts import DeepseekExperts, QwenExperts
from drafter.published.mtp.latent_attention import LatentAttention
from drafter.published.rows import RowBatch

_OF_LAYER = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")


class MtpModule(PublishedModule):
    """A module whose names begin with `prefix`; the first of `renamed` that fits gives its parameter."""

    renamed: Mapping[str, str] = {}
    hidden_first = False  # of a row's two sides
    blind_at_first = True  # the embedding at position 0 is zero
    recycles_normed = True  # the next row's hidden state is behind the final norm

    def __init__(self, config: CheckpointConfig, names: Collection[str], prefix: str) -> None:
        config = config.having(layer_types=None)  # of the target; the module's own layer attends to all
        shape = DecoderShape.of(config)
        layers = config.integer("num_hidden_layers", at_most=MAX_LAYERS)
        needs = TargetNeeds(shape.hidden, vocab_of(config), final_state=True, num_layers=layers)
        super().__init__(config, shape, needs, 1)
        self._prefix = prefix
        self._own = frozenset(self._parameter(name) for name in names if name.startswith(prefix))
        self.token_layernorm = shape.norm()
        self.hidden_layernorm = shape.norm()
        self.input_proj = linear(2 * shape.hidden, shape.hidden)
        self.layer = self._layer(config, shape, names)
        self.final_layernorm = shape.norm()

    def _layer(self, config: CheckpointConfig, shape: DecoderShape, names: Collection[str]) -> DraftLayer:
        return DraftLayer(shape)

    def published_name(self, name: str) -> str | None:
        if name.startswith(self._prefix):
            return None if name.endswith("rotary_emb.inv_freq") else self._parameter(name)
        name = name.removeprefix("model.")
        return name if name in {EMBEDDINGS, HEAD} - self._own else None  # None: of the target

    def _parameter(self, name: str) -> str:
        name = name.removeprefix(self._prefix)
        for published, parameter in self.renamed.items():
            if name.startswith(published):
                return parameter + name.removeprefix(published)
        return f"layer.{name}" if name.startswith(_OF_LAYER) else name

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(self, rows: RowBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed_tokens(tokens)
        if self.blind_at_first:
            embedded = embedded.masked_fill((rows.positions == 0)[:, None], 0)
        sides = [self.token_layernorm(embedded), self.hidden_layernorm(hidden)]
        mixed = self.input_proj(torch.cat(sides[::-1] if self.hidden_first else sides, dim=-1))
        residual = self.through([self.layer], mixed, rows)
        output = self.final_layernorm(residual)
        return output, output if self.recycles_normed else residual


class MimoMtp(MtpModule):
    """The module of MiMo."""

    hidden_first = True

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        super().__init__(config, names, "model.mtp_layers.0.")


class DeepseekMtp(MtpModule):
    """The module of DeepSeek V3 and GLM-4.5, which lies behind the target's last layer."""

    renamed: Mapping[str, str] = {
        "enorm.": "token_layernorm.",
        "hnorm.": "hidden_layernorm.",
        "eh_proj.": "input_proj.",
        "shared_head.norm.": "final_layernorm.",
        "shared_head.head.": "lm_head.",
    }

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        config.must_be("model_type", "deepseek_v3", GLM)
        self._latent = config.text("model_type", "deepseek_v3") == "deepseek_v3"
        self.recycles_normed = self._latent  # as vLLM 0.32 does for each of the two
        if self._latent:
            config = config.having(head_dim=config.integer("qk_rope_head_dim"))
        layers = config.integer("num_hidden_layers", at_most=MAX_LAYERS)
        super().__init__(config, names, f"model.layers.{layers}.")

    def _layer(self, config: CheckpointConfig, shape: DecoderShape, names: Collection[str]) -> DraftLayer:
        return DraftLayer(
            shape,
            attention=LatentAttention(config, shape) if self._latent else None,
            mlp=DeepseekExperts(config, shape.hidden) if config.values.get("n_routed_experts") else None,
        )


class QwenMtp(MtpModule):
    """The module of Qwen3-Next."""

    renamed: Mapping[str, str] = {
        "fc.": "input_proj.",
        "norm.": "final_layernorm.",
        "pre_fc_norm_embedding.": "token_layernorm.",
        "pre_fc_norm_hidden.": "hidden_layernorm.",
        "layers.0.": "layer.",
    }
    blind_at_first = False

    def __init__(self, config: CheckpointConfig, names: Collection[str], prefix: str = "mtp.") -> None:
        config.must_be("model_type", QWEN_NEXT)
        super().__init__(config, names, prefix)

    def _layer(self, config: CheckpointConfig, shape: DecoderShape, names: Collection[str]) -> DraftLayer:
        fused = any(name.endswith("experts.gate_up_proj") for name in self._own)
        return DraftLayer(shape, mlp=QwenExperts(config, shape.hidden, fused=fused))


class SpeculatorsMtp(QwenMtp):
    """The same module in a checkpoint of its own, as `speculators` fine-tunes it."""

    renamed: Mapping[str, str] = {}

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        super().__init__(config, names, "mtp_layers.0.")
