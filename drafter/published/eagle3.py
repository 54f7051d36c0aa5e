"""EAGLE-3, 3.1 and P-EAGLE: decoder layers that read the target's hidden states after several layers.

A row at position i has the states g_i of token i and the embedding of token i + 1. The first layer's attention reads
both, each after a norm; the residual is the state alone. Behind the target's states, the drafter's own output takes
the place of g: before the final norm in EAGLE-3, after it in 3.1 (`norm_output`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import torch
from torch import nn

from drafter.published.checkpoint_config import MAX_LAYERS, CheckpointConfig
from drafter.published.layers import DecoderShape, DraftLayer, linear, norm
from drafter.published.module import PublishedModule, TargetNeeds, vocab_of
from drafter.published.rows import CommittedRows, RowBatch, SessionRows

_USUAL_STATES = 3
_LEGACY_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


class FirstLayer(DraftLayer):
    """The layer that reads the embedding beside the hidden state."""

    def __init__(self, shape: DecoderShape, *, norm_before_residual: bool) -> None:
        super().__init__(shape, inputs=2 * shape.hidden)
        self.hidden_norm = norm(shape.hidden, shape.eps)
        self._norm_before_residual = norm_before_residual

    def mix(self, embedded: torch.Tensor, hidden: torch.Tensor, rows: RowBatch) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        assert self.input_layernorm is not None
        inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self.attend(inputs, normed if self._norm_before_residual else hidden, rows, 0)


class PublishedEagle3(PublishedModule):
    """An EAGLE-3 drafter in the original layout; `speculators` differ in their configuration only."""

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        shape = DecoderShape.of(config)
        eagle = config.section("eagle_config")
        layers = config.integer("num_hidden_layers", 1, at_most=MAX_LAYERS)
        target_hidden = config.integer("target_hidden_size", shape.hidden)
        listed = "eagle_aux_hidden_state_layer_ids"  # read as vLLM does; SGLang adds 1 to those within `eagle_config`
        states = eagle.layer_ids(listed) or config.layer_ids(listed)
        uses_states = eagle.flag("use_aux_hidden_state", True)
        usual = len(states) or _USUAL_STATES
        count = config.integer("num_aux_hidden_states", usual, at_most=MAX_LAYERS) if uses_states else 1
        if states and uses_states and len(states) != count:
            raise config.wrong("num_aux_hidden_states", count, f"{len(states)}, the number of layer ids")
        captured = states if uses_states else ()
        needs = TargetNeeds(target_hidden, vocab_of(config), count, captured, final_state=not uses_states)
        super().__init__(config, shape, needs, layers)
        before_fc = eagle.flag("norm_before_fc", config.flag("norm_before_fc", False))
        width = target_hidden * count
        self.input_norm = norm(width, shape.eps) if before_fc and uses_states else None
        self.fc_norm = None
        if config.flag("fc_norm", False) and uses_states:
            self.fc_norm = nn.ModuleList(norm(target_hidden, shape.eps) for _ in range(count))
        self.fc = linear(width, shape.hidden) if uses_states else None
        first = FirstLayer(shape, norm_before_residual=config.flag("norm_before_residual", False))
        self.layers = nn.ModuleList([first, *(DraftLayer(shape) for _ in range(layers - 1))])
        self.norm = norm(shape.hidden, shape.eps)
        self._norm_output = config.flag("norm_output", False)

    def published_name(self, name: str) -> str | None:
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
            return None
        later_norm = name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")
        return None if later_norm else _LEGACY_NORMS.get(name, name)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(self.needs.states, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return states if self.fc is None else self.fc(states)

    def step(self, rows: RowBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, *rest = self.layers
        assert isinstance(first, FirstLayer)
        residual = first.mix(self.embed_tokens(tokens), hidden, rows)
        residual = self.through(rest, residual, rows, first=1)
        normed = self.norm(residual)
        return normed, normed if self._norm_output else residual


class PublishedPeagle(PublishedEagle3):
    """P-EAGLE: rows of `masks` stand for tokens that are not known, so that one `step` guesses several."""

    places = 8  # the depth that published ones are trained to

    def __init__(self, config: CheckpointConfig, names: Collection[str]) -> None:
        super().__init__(config, names)
        self._mask_token = config.integer("mask_token_id", at_least=0, at_most=self.needs.vocab - 1)
        self.mask_hidden = nn.Parameter(torch.empty(1, self.needs.states * self.needs.hidden, device="meta"))

    def masks(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and hidden states; the learned row takes the place of the target's states."""
        tokens = torch.full((count,), self._mask_token, device=self.mask_hidden.device)
        return tokens, self._mask_state.expand(count, -1)

    @cached_property
    def _mask_state(self) -> torch.Tensor:
        return self.project(self.mask_hidden)

    def guess(self, batch: Sequence[CommittedRows]) -> torch.Tensor:
        """Append the committed rows; return what the head reads of the guesses.  # [sessions, places, width]"""
        mask_tokens, mask_states = self.masks(self.places - 1)
        rows = [SessionRows(each.cache, len(each.states) + len(mask_tokens)) for each in batch]
        tokens = [part for each in batch for part in (each.token_ids(mask_tokens.device), mask_tokens)]
        states = [part for each in batch for part in (each.states, mask_states)]
        outputs, _ = self.step(RowBatch(rows, mask_tokens.device), torch.cat(tokens), torch.cat(states))
        for each in batch:
            each.cache.truncate(each.cache.length - len(mask_tokens))
        return torch.stack([part[-self.places :] for part in torch.split(outputs, [row.count for row in rows])])
