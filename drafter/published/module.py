"""Common parts of all published drafters: their needs, their embeddings and their head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from drafter.published.checkpoint_config import CheckpointConfig
from drafter.published.layers import DecoderShape, linear
from drafter.published.rows import DraftKvCache, RowBatch
from outrider.protocol.checks import MAX_IDS

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TargetNeeds:
    """Requirements of a drafter on its target. State k is the hidden state after k layers, before the final norm."""

    hidden: int
    vocab: int
    states: int = 1  # states of a token that the drafter reads
    state_layers: tuple[int, ...] = ()  # empty: the usual ones
    final_state: bool = False  # it reads the one state after the final norm
    num_layers: int | None = None  # None: any

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the states to capture from a target of so many layers."""
        if self.final_state:
            return ()
        return self.state_layers or (2, num_layers // 2, num_layers - 3)


class PublishedModule(nn.Module):
    """Weights under their published names, and the pass that drafts with them.

    A row of hidden states belongs to the token before the row's token. `project` turns the target's states into rows
    of the drafter's width; it depends on no other token, so another process can run it.
    """

    #: Tensors that a checkpoint may lack; the target's embeddings and head take the place of the drafter's.
    optional = frozenset({EMBEDDINGS, HEAD})
    by_column: tuple[str, ...] = (HEAD,)  # tensors with a row for each drafted id

    def __init__(self, config: CheckpointConfig, shape: DecoderShape, needs: TargetNeeds, layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.needs = needs
        self._num_caches = layers
        self.logit_scale = config.number("logit_scale", 1.0)
        self.draft_vocab = config.integer("draft_vocab_size", needs.vocab, at_most=needs.vocab)
        self.embed_tokens = nn.Embedding(needs.vocab, shape.hidden, device="meta")
        self.lm_head = linear(shape.hidden, self.draft_vocab)
        self.ids = torch.arange(self.draft_vocab)  # target ids of the columns of logits

    def published_name(self, name: str) -> str | None:
        """Return the parameter that a tensor of the checkpoint fills; None for tensors that only training needs."""
        return name

    @property
    def column_ids(self) -> torch.Tensor | None:
        """Return the target ids of the columns of logits; None for the whole vocabulary."""
        return self.ids if self.draft_vocab < self.needs.vocab else None

    def new_cache(self) -> DraftKvCache:
        return DraftKvCache(self._num_caches)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rows of the drafter's width for the target's states.  # [tokens, states × width]"""
        raise NotImplementedError

    def step(self, rows: RowBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows; return what the head reads of each, and the hidden states for the rows after them."""
        raise NotImplementedError

    def through(
        self, layers: Iterable[nn.Module], residual: torch.Tensor, rows: RowBatch, *, first: int = 0
    ) -> torch.Tensor:
        """Run decoder layers from number `first` on, and keep the rows."""
        for number, layer in enumerate(layers, first):
            residual = layer(residual, rows, number)
        rows.advance()
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the drafted ids.  # [tokens, draft vocab]"""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits * self.logit_scale


ModuleMaker = Callable[[CheckpointConfig, Collection[str]], PublishedModule]  # of a configuration and tensors


def vocab_of(config: CheckpointConfig) -> int:
    return config.integer("vocab_size", at_most=MAX_IDS)
