"""A step: its sessions with their blocks, the inputs of its forward pass, and where its outputs are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outrider.engine.interface import SessionTokens
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.protocol.speculation import TreeShape


@dataclass(slots=True)
class Segment:
    """One session's share of a step."""

    start: int  # index of its first token in the step
    new: SessionTokens
    base: int  # number of tokens cached before
    blocks: Sequence[int]

    @property
    def count(self) -> int:
        """Return the number of new tokens."""
        return len(self.new.tokens)

    @property
    def end(self) -> int:
        """Return the index after its last token in the step."""
        return self.start + self.count

    def tree_mask(self) -> torch.Tensor:
        """Return which new tokens each new token attends to: itself and its ancestors.  # [tokens, tokens]"""
        if not self.new.parents:
            return torch.ones((self.count, self.count), dtype=torch.bool).tril()
        mask = torch.zeros((self.count, self.count), dtype=torch.bool)
        for index, path in enumerate(TreeShape(tuple(self.new.parents)).paths):
            mask[index, list(path)] = True
        return mask


@dataclass(slots=True)
class ForwardStep:
    """The inputs of one forward pass over all sessions."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # indices of the tokens with an output, see `output_indices`
    counts: list[int] = field(default_factory=list)  # number of logits per segment
    segments: list[Segment] = field(default_factory=list)
    input_embeddings: torch.Tensor | None = None  # [tokens, width], in place of embeddings

    @property
    def num_logits(self) -> int:
        """Return how many of `outputs`, from the first, need logits; the others need hidden states only."""
        return sum(self.counts)


def output_indices(segments: Sequence[Segment], first_of: Mapping[int, int]) -> list[int]:
    """Return the indices of all tokens that need logits, then of those that need hidden states only.

    `first_of` maps each segment's start to the index of its first token.
    """
    logits: list[int] = []
    hidden: list[int] = []
    for segment in segments:
        new, first = segment.new, first_of[segment.start]
        logits += range(first + new.logits_from, first + segment.count)
        if new.hidden_from is not None:
            hidden += range(first + new.hidden_from, first + new.logits_from)
    return logits + hidden


def hidden_states_of(step: ForwardStep, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the requested hidden states of each segment, in the order of its tokens."""
    with_logits, only = 0, step.num_logits
    for segment, count in zip(step.segments, step.counts, strict=True):
        first = segment.new.hidden_from
        if first is None:
            yield hidden[:0]
        else:
            before = max(0, segment.new.logits_from - first)
            after = hidden[with_logits + max(0, first - segment.new.logits_from) : with_logits + count]
            yield torch.cat([hidden[only : only + before], after]) if before else after
            only += before
        with_logits += count


def slot_of(blocks: Sequence[int], index: int) -> int:
    """Return the slot of a session's token."""
    return blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
