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
    new: SessionTokens
    base: int  # number of tokens cached before
    blocks: Sequence[int]
    depths: Sequence[int]  # distance of each token from the end of the cached prefix

    @property
    def count(self) -> int:
        """Return the number of new tokens."""
        return len(self.new.tokens)

    @property
    def end(self) -> int:
        """Return the index after its last token in the step."""
        return self.start + self.count

    @property
    def positions(self) -> list[int]:
        """Return the position of each new token in its text."""
        return [self.base + depth for depth in self.depths]

    def tree_mask(self) -> torch.Tensor:
        """Return which new tokens each new token attends to: itself and its ancestors.  # [tokens, tokens]"""
        if not self.new.parents:
            return torch.ones((self.count, self.count), dtype=torch.bool).tril()
        paths = TreeShape(tuple(self.new.parents)).paths
        mask = torch.zeros((self.count, self.count), dtype=torch.bool)
        mask[[i for i, path in enumerate(paths) for _ in path], [node for path in paths for node in path]] = True
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
    def of(cls, segments: Sequence[Segment]) -> ForwardStep:
        """Join the inputs of all segments."""
        embeddings = [part.new.input_embeddings for part in segments if part.new.input_embeddings is not None]
        return cls(
            segments,
            [token for part in segments for token in part.new.tokens],
            [position for part in segments for position in part.positions],
            output_indices(segments, {part.start: part.start for part in segments}),
            torch.cat(embeddings) if embeddings else None,
        )

    @property
    def counts(self) -> list[int]:
        """Return the number of logits of each segment."""
        return [part.count - part.new.logits_from for part in self.segments]

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
            first = segment.new.hidden_from
            if first is None:
                yield hidden[:0]
            else:
                before = max(0, segment.new.logits_from - first)
                after = hidden[with_logits + max(0, first - segment.new.logits_from) : with_logits + count]
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
        new, first = segment.new, first_of[segment.start]
        logits += range(first + new.logits_from, first + segment.count)
        if new.hidden_from is not None:
            hidden += range(first + new.hidden_from, first + new.logits_from)
    return logits + hidden


def slot_of(blocks: Sequence[int], index: int) -> int:
    """Return the slot of a session's token."""
    return blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
