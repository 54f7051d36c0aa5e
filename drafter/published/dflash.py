"""DFlash and DSpark: all guesses of a block in one pass that is not causal within the block.

The keys and values of committed tokens come from the target's states alone. A block has the last committed token, the
anchor, and mask tokens; it leaves nothing in the cache. DSpark adds to the logits a bias that depends on the token
before, and says how likely a guess is to be accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from drafter.published.checkpoint_config import MAX_LAYERS, CheckpointConfig, refused
from drafter.published.layers import DecoderShape, DraftAttention, DraftLayer, linear, norm
from drafter.published.module import HEAD, PublishedModule, TargetNeeds, vocab_of
from drafter.published.rows import CommittedRows, DraftKvCache, RowBatch, SessionRows
from outrider.train.methods.published_markov import MARKOV_HEADS

_MAX_BLOCK = 64


class PublishedDflash(PublishedModule):
    """A DFlash drafter."""

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        config = config.having(**config.section("dflash_config").values)
        config.must_be("use_swa", False)
        config.must_be("sliding_window_non_causal", True)
        config.must_be("attention_value_scale", 1.0)
        config.must_be("attention_sink_bias", False)
        config.must_be("is_neox_style", True)
        if (config.folder / "mask_embedding.pt").exists():
            raise refused(config.folder, "has a mask_embedding.pt, which is not supported")
        shape = DecoderShape.of(config)
        layers = config.integer("num_hidden_layers", at_most=MAX_LAYERS)
        target_hidden = config.integer("target_hidden_size", shape.hidden)
        captured = _captured(config, layers)
        num_layers = config.integer("num_target_layers", 0, at_least=0, at_most=MAX_LAYERS) or None
        needs = TargetNeeds(target_hidden, vocab_of(config), len(captured), captured, num_layers=num_layers)
        super().__init__(config, shape, needs, layers)
        self._mask_token = config.integer("mask_token_id", at_least=0, at_most=needs.vocab - 1)
        self._causal = config.flag("is_causal", config.flag("causal", False))
        self.block_size = config.integer("block_size", 16, at_least=2, at_most=_MAX_BLOCK)
        self.from_anchor = config.flag("sample_from_anchor", False)
        self.fc = linear(len(captured) * target_hidden, shape.hidden)
        self.hidden_norm = norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(layers))
        self.norm = norm(shape.hidden, shape.eps)

    def published_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("encoder.fc.", "fc.")
        return None if name == "t2d" else name.replace("encoder.output_norm_enc.", "hidden_norm.")

    def project(self, states: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.hidden_norm(self.fc(states))
        return projected

    def commit(self, rows: RowBatch, projected: torch.Tensor) -> None:
        """Append the keys and values of committed tokens."""
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            assert isinstance(layer.self_attn, DraftAttention)
            rows.append(number, *layer.self_attn.keys_and_values(projected, rows.positions))
        rows.advance()

    def guess(self, batch: Sequence[CommittedRows]) -> torch.Tensor:
        """Append the committed rows; return what the head reads of the guesses.  # [sessions, places, width]"""
        rows = [SessionRows(each.cache, len(each.states)) for each in batch]
        self.commit(RowBatch(rows, self.fc.weight.device), torch.cat([each.states for each in batch]))
        return self.block([each.cache for each in batch], [each.tokens[-1] for each in batch])

    @property
    def places(self) -> int:
        """Return the number of guesses of a block."""
        return self.block_size - 1 + self.from_anchor

    def block(self, caches: Sequence[DraftKvCache], anchors: Sequence[int]) -> torch.Tensor:
        """Return what the head reads of the guesses after each session's anchor.  # [sessions, guesses, width]"""
        tokens = torch.full((len(caches), self.block_size), self._mask_token, device=self.fc.weight.device)
        tokens[:, 0] = torch.tensor(anchors)
        parts = [SessionRows(cache, self.block_size, causal=self._causal) for cache in caches]
        rows = RowBatch(parts, tokens.device)
        hidden: torch.Tensor = self.norm(self.through(self.layers, self.embed_tokens(tokens.flatten()), rows))
        for cache in caches:
            cache.truncate(cache.length - self.block_size)
        return hidden.view(*tokens.shape, -1)[:, 0 if self.from_anchor else 1 :]


class PublishedDspark(PublishedDflash):
    """A DSpark drafter: DFlash with a Markov head and a confidence head."""

    by_column = (HEAD, "markov_head.markov_w2.weight")

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        config = config.having(
            **{"sample_from_anchor": True, **config.values, **config.section("dflash_config").values}
        )
        config.must_be("markov_head_type", *MARKOV_HEADS)
        super().__init__(config, names)
        rank, kind = config.integer("markov_rank"), config.text("markov_head_type", "vanilla")
        with torch.device("meta"):
            self.markov_head = MARKOV_HEADS[kind](self.needs.vocab, self.draft_vocab, rank, self.shape.hidden)
        self.confidence_head = None
        if config.flag("enable_confidence_head", False):
            self._with_markov = config.flag("confidence_head_with_markov", False)
            width = self.shape.hidden + rank * self._with_markov
            self.confidence_head = nn.ModuleDict({"proj": linear(width, 1, bias=True)})

    def markov(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's states, and what the tokens before guesses add to their logits."""
        state, bias = self.markov_head(state, previous, hidden)
        return state, bias * self.logit_scale

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Return the probability that each guess is accepted; None without that head."""
        if self.confidence_head is None:
            return None
        parts = [hidden, self.markov_head.markov_w1(previous)] if self._with_markov else [hidden]
        return torch.sigmoid(self.confidence_head["proj"](torch.cat(parts, dim=-1))[:, 0])


def _captured(config: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """Return the states to capture; `target_layer_ids` count the layer whose output it is from 0."""
    known = config.layer_ids("aux_hidden_state_layer_ids") or tuple(i + 1 for i in config.layer_ids("target_layer_ids"))
    if known:
        return known
    last = config.integer("num_target_layers", at_least=5, at_most=MAX_LAYERS) - 4
    return tuple(round(1 + i * last / max(1, layers - 1)) + 1 for i in range(layers))
