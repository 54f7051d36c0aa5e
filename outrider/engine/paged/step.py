"""A step: its sessions with their blocks, the inputs of its forward pass, and where its outputs are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.protocol.speculation import TreeShape

_NO_STATES = torch.empty((0, 0))  # made once: the first use of torch in a step takes long


@dataclass(slots=True)  # made for every session of a step
class Segment:
    """One session's share of a step."""

    start: int  # index of its first token in the step
    tokens: Sequence[int]
    count: int  # number of new tokens
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
            paths = TreeShape(tuple(new.parents)).paths
            positions = [base + len(path) - 1 for path in paths]
            nodes = [node for node, path in enumerate(paths) for _ in path]
            mask = torch.zeros((len(paths), len(paths)), dtype=torch.bool)
            mask[nodes, [each for path in paths for each in path]] = True  # itself and its ancestors
        count = len(new.tokens)
        return cls(start, new.tokens, count, base, blocks, positions, mask, new.logits_from, new.hidden_from)

    @property
    def end(self) -> int:
        """Return the index after its last token in the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """The inputs of one forward pass over all sessions."""

    segments: Sequence[Segment]
    ids: list[int]
    positions: list[int]
    outputs: list[int]  # indices of the tokens with an output, see `_output_indices`
    counts: list[int]  # number of logits of each segment
    num_logits: int  # how many of `outputs`, from the first, need logits; the others need hidden states only
    input_embeddings: torch.Tensor | None = None  # [tokens, width], in place of embeddings
    layers: tuple[int, ...] = ()  # after which states of `outputs` are captured, ascending

    @classmethod
    def of(cls, segments: Sequence[Segment], inputs: Sequence[torch.Tensor], layers: Iterable[int]) -> ForwardStep:
        """Join the inputs of all segments."""
        counts = [segment.count - segment.logits_from for segment in segments]
        return cls(
            segments,
            ids=[token for segment in segments for token in segment.tokens],
            positions=[position for segment in segments for position in segment.positions],
            outputs=_output_indices(segments),
            counts=counts,
            num_logits=sum(counts),
            input_embeddings=torch.cat(list(inputs)) if inputs else None,
            layers=tuple(sorted(set(layers))),
        )

    def result(self, logits: torch.Tensor, hidden: torch.Tensor) -> StepResult:
        """Split the logits and hidden states of `outputs` by session, in the order of their tokens."""
        if len(self.outputs) == self.num_logits and all(segment.hidden_from is None for segment in self.segments):
            return StepResult(logits, self.counts, [_NO_STATES] * len(self.segments))
        logits = logits[: self.num_logits]
        hidden_states: list[torch.Tensor] = []
        with_logits, only = 0, self.num_logits
        for segment, count in zip(self.segments, self.counts, strict=True):
            own = hidden[:0]
            if segment.hidden_from is not None:
                before = max(0, segment.logits_from - segment.hidden_from)
                skipped = max(0, segment.hidden_from - segment.logits_from)
                own = hidden[with_logits + skipped : with_logits + count]
                if before:
                    own = torch.cat([hidden[only : only + before], own])
                    only += before
            hidden_states.append(own)
            with_logits += count
        return StepResult(logits, self.counts, hidden_states, self.layers)


def _output_indices(segments: Sequence[Segment]) -> list[int]:
    """Return the indices of tokens that need logits, then of those that need states only."""
    logits: list[int] = []
    hidden: list[int] = []
    for segment in segments:
        logits += range(segment.start + segment.logits_from, segment.end)
        if segment.hidden_from is not None:
            hidden += range(segment.start + segment.hidden_from, segment.start + segment.logits_from)
    return logits + hidden


def slot_of(blocks: Sequence[int], index: int) -> int:
    """Return the slot of a session's token."""
    return blocks[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
