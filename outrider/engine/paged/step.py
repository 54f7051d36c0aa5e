"""A step: its sessions with their blocks, the inputs of its forward pass, and where its outputs are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.protocol.speculation import TreeShape


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's share of a step."""

    start: int  # index of its first token in the step
    tokens: Sequence[int]
    base: int  # number of tokens cached before
    blocks: Sequence[int]
    positions: Sequence[int]  # of each new token in its text
    mask: torch.Tensor | None  # which new tokens each new token attends to; None: a chain  # [tokens, tokens]
    logits_from: int
    hidden_from: int | None

    @classmethod
    def of(cls, start: int, new: SessionTokens, base: int, blocks: Sequence[int]) -> Segment:
        """Place a session's new tokens after `base` cached ones."""
        positions: Sequence[int] = range(base, base + len(new.tokens))
        mask = None
        if new.parents:
            shape = TreeShape(tuple(new.parents))
            positions = [base + depth - 1 for depth in shape.depths]
            mask = _tree_mask(shape.paths)
        return cls(start, new.tokens, base, blocks, positions, mask, new.logits_from, new.hidden_from)

    @property
    def count(self) -> int:
        """Return the number of new tokens."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Return the index after its last token in the step."""
        return self.start + self.count

    @property
    def num_logits(self) -> int:
        return self.count - self.logits_from


def _tree_mask(paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return which nodes each node attends to: itself and its ancestors.  # [nodes, nodes]"""
    mask = torch.zeros((len(paths), len(paths)), dtype=torch.bool)
    mask[[node for node, path in enumerate(paths) for _ in path], [each for path in paths for each in path]] = True
    return mask


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """The inputs of one forward pass over all sessions."""

    segments: Sequence[Segment]
    ids: list[int]
    positions: list[int]
    outputs: list[int]  # indices of the tokens with an output, see `output_indices`
    input_embeddings: torch.Tensor | None  # [tokens, width], in place of embeddings

    @classmethod
    def of(cls, segments: Sequence[Segment], input_embeddings: Sequence[torch.Tensor]) -> ForwardStep:
        """Join the inputs of all segments."""
        return cls(
            segments,
            [token for part in segments for token in part.tokens],
            [position for part in segments for position in part.positions],
            output_indices(segments, {part.start: part.start for part in segments}),
            torch.cat(list(input_embeddings)) if input_embeddings else None,
        )

    @property
    def counts(self) -> list[int]:
        """Return the number of logits of each segment."""
        return [part.num_logits for part in self.segments]

    @property
    def num_logits(self) -> int:
        """Return how many of `outputs`, from the first, need logits; the others need hidden states only."""
        return sum(self.counts)

    def result(self, logits: torch.Tensor, hidden: torch.Tensor) -> StepResult:
        """Split the logits and hidden states of `outputs` by session."""
        counts = self.counts
        logits = logits[: sum(counts)]
        return StepResult(logits, list(torch.split(logits, counts)), list(self._hidden_states(hidden)))

    def _hidden_states(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the requested hidden states of each segment, in the order of its tokens."""
        with_logits, only = 0, self.num_logits
        for segment, count in zip(self.segments, self.counts, strict=True):
            first = segment.hidden_from
            if first is None:
                yield hidden[:0]
            else:
                before = max(0, segment.logits_from - first)
                after = hidden[with_logits + max(0, first - segment.logits_from) : with_logits + count]
                yield torch.cat([hidden[only : only + before], after]) if before else after
                only += before
            with_logits += count


def output_indices(segments: Sequence[Segment], first_of: Mapping[int, int]) -> list[int]:
    """Return the indices of all tokens that need logits, then of those that need hidden states only.

    `first_of` maps each segment's start to the index of its first token.
    """
    logits: list[int] = []
    hidden: list[int] = []
    for segment in segments:
        first = first_of[segment.start]
        logits += range(first + segment.logits_from, first + segment.count)
        if segment.hidden_from is not None:
            hidden += range(first + segment.hidden_from, first + segment.logits_from)
    return logits + hidden


def slot_of(blocks: Sequence[int], index: int) -> int:
    """Return the slot of a session's token."""
    return blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
