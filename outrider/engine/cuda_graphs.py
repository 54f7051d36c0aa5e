"""A plan run by torch in a few fixed shapes: on a CUDA device a whole step is one graph.

A step of few rows takes a GPU less time than Python needs to launch its
kernels one by one. So such a step is padded to a bucket (sessions, rows to
each, tokens of context), whose kernels are captured once and then launched
together; what differs from step to step goes there in one copy. Steps of many
rows, as of a prompt, run the same arithmetic without padding or capture. On a
CPU nothing is captured and everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
import torch

from outrider.engine.block_manager import BLOCK_TOKENS, blocks_for
from outrider.engine.decoder import FEW_ROWS, Decoder, SessionGroup
from outrider.engine.model_spec import ModelSpec
from outrider.engine.paged import ForwardStep, PagedEngine, Segment, slot_of, wanted_rows
from outrider.protocol.fleet import ModelInfo

_LEAST_CONTEXT = 256
_MOST_COPIED = 1 << 30  # bytes of keys and values that attention may copy at once
_BEYOND = 1024  # guesses may look past the end of the context by less than this
_MOST_PADDED = 16  # rows of a session that shares its attention with others outside a bucket
_MOST_BUCKETS = 96  # a graph of some six hundred kernels takes megabytes
_COMMON_ROWS = (1, 2, 4, 8, 16, 32)
_COMMON_CONTEXTS = (256, 512, 1024)

Results = tuple[torch.Tensor, torch.Tensor]  # logits, final hidden states

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a bucket has room for."""

    sessions: int
    rows: int  # of each session
    context: int  # tokens of each session, cached and new

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> GraphShape:
        rows = _bucket(max(segment.count for segment in segments))
        return cls(
            _bucket(len(segments)),
            rows,
            _bucket(max(_LEAST_CONTEXT, *(segment.base + rows for segment in segments))),
        )

    @property
    def all_rows(self) -> int:
        return self.sessions * self.rows

    @property
    def pages(self) -> int:
        return self.context // BLOCK_TOKENS


class CudaGraphEngine(PagedEngine):
    """A result of `extend` is good until the next one."""

    def __init__(
        self, plan: ModelSpec, info: ModelInfo, *, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        super().__init__(info, plan.head.weight.device, kv_tokens, evictable_tokens)
        capacity = self.capacity_tokens
        positions = min(capacity, info.context_length + _BEYOND) if info.context_length else capacity
        self._scratch = capacity // BLOCK_TOKENS  # a page that padding writes to
        self._skeleton = Decoder(plan, capacity + BLOCK_TOKENS, positions)
        self._buckets: dict[GraphShape, GraphBucket] = {}
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None  # graphs never run at the same time

    @property
    def shapes(self) -> list[GraphShape]:
        """Those that have a bucket, the last used last."""
        return list(self._buckets)

    @property
    def captured(self) -> list[GraphShape]:
        """Those of them that run as graphs."""
        return [shape for shape, bucket in self._buckets.items() if bucket.is_captured]

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Make the graphs of one session's common steps now, not in the middle of its text."""
        if self.device.type != "cuda":
            return
        most = self.info.context_length or self.capacity_tokens
        contexts = [context for context in _COMMON_CONTEXTS if context // 2 < most]
        progress(f"capturing {len(contexts) * len(_COMMON_ROWS)} graphs")
        for context in contexts:
            for rows in _COMMON_ROWS:
                self._bucket_of(GraphShape(1, rows, context))

    def _run(self, step: ForwardStep) -> Results:
        shape = GraphShape.of(step.segments)
        if shape.all_rows <= FEW_ROWS and self._fits(shape.sessions * shape.context):
            logits, hidden = self._bucket_of(shape).run(step.segments)
            return logits[: len(step.wanted)], hidden[: len(step.wanted)]
        return self._run_freely(step)

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        self._skeleton.copy_pages(copies)

    def _move(self, old: Sequence[int], new: Sequence[int]) -> None:
        self._skeleton.move(old, new)

    def _fits(self, tokens: int) -> bool:
        return self._skeleton.copied_bytes(tokens) <= _MOST_COPIED

    def _bucket_of(self, shape: GraphShape) -> GraphBucket:
        bucket = self._buckets.pop(shape, None)
        if bucket is None:
            if len(self._buckets) == _MOST_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            bucket = GraphBucket(shape, self._skeleton, self._scratch, self.device)
            if self._stream is not None and self._memory is not None:
                bucket.capture(self._stream, self._memory)
        self._buckets[shape] = bucket  # the last used is the last to be given up
        return bucket

    def _run_freely(self, step: ForwardStep) -> Results:
        """Any number of rows: those of prompts as they are, the others' padded to the same count."""
        at: dict[int, int] = {}
        first, parts, inputs = 0, [], []
        for segments in self._groups(step.segments):
            rows = max(segment.count for segment in segments)
            longest = max(segment.base for segment in segments) + rows
            padded = Padded(
                GraphShape(len(segments), rows, blocks_for(longest) * BLOCK_TOKENS), self._scratch, self.device
            )
            padded.send(segments)
            at |= {segment.start: first + i * rows for i, segment in enumerate(segments)}
            parts.append(padded.part(first))
            inputs.append(padded.rows)
            first = parts[-1].end
        ids, positions, slots = torch.cat(inputs, dim=1)
        wanted = torch.tensor(wanted_rows(step.segments, at), dtype=torch.int64, device=self.device)
        return self._skeleton.run(ids, positions, slots, wanted, parts)

    def _groups(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Who attends together: prompts alone, the others with those whose contexts are as long, while they fit."""
        groups: list[list[Segment]] = []
        together: list[Segment] = []
        for segment in sorted(segments, key=lambda segment: segment.base):
            if segment.count > _MOST_PADDED:
                groups.append([segment])
            elif together and not self._fits((len(together) + 1) * (segment.base + _MOST_PADDED)):
                groups.append(together)
                together = [segment]
            else:
                together.append(segment)
        return [*groups, together] if together else groups


class Padded:
    """The inputs of a shape: filled in here, sent in one copy, read there."""

    def __init__(self, shape: GraphShape, scratch: int, device: torch.device, pinned: bool = False) -> None:
        self.shape = shape
        size = sum(_sizes(shape))
        self._here = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._there = torch.zeros(size, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._device = device
        self._fields = _Fields.of(self._here, shape)
        self._inputs = _Fields.of(self._there, shape)
        self._fields.slots.fill_(scratch * BLOCK_TOKENS)
        self._fields.table.fill_(scratch)
        self._fields.sees.fill_(True).tril_()  # as in a chain
        self._empty = self._here.numpy().copy()
        self._whole = self._here.numpy()
        self._arrays = [field.numpy() for field in self._fields]

    @property
    def rows(self) -> torch.Tensor:
        """Ids, positions and slots.  # [3, rows]"""
        return self._there[: 3 * self.shape.all_rows].view(3, -1)

    @property
    def wanted(self) -> torch.Tensor:
        return self._inputs.wanted

    def part(self, first: int) -> SessionGroup:
        to = self._inputs
        return SessionGroup(
            first,
            self.shape.sessions,
            self.shape.rows,
            table=to.table.view(-1),
            base=to.base,
            positions=to.positions,
            sees=to.sees,
        )

    def send(self, segments: Sequence[Segment]) -> None:
        if self._sent is None:
            self._fill(segments)
            self._there.copy_(self._here)
            return
        self._sent.synchronize()  # what the last copy read may be written again
        self._fill(segments)
        self._there.copy_(self._here, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))

    def _fill(self, segments: Sequence[Segment]) -> None:
        self._whole[:] = self._empty
        ids, positions, slots, wanted, base, table, sees = self._arrays
        for i, segment in enumerate(segments):
            count = segment.count
            ids[i, :count] = segment.rows.tokens
            positions[i, :count] = [segment.base + depth for depth in segment.rows.depths()]
            slots[i, :count] = [slot_of(segment.pages, segment.base + row) for row in range(count)]
            base[i] = segment.base
            table[i, : len(segment.pages)] = segment.pages
            if segment.rows.parents:
                sees[i, :count, :count] = segment.sees().numpy()
        chosen = wanted_rows(segments, {segment.start: i * self.shape.rows for i, segment in enumerate(segments)})
        wanted[: len(chosen)] = chosen


class _Fields(NamedTuple):
    """Parts of one tensor."""

    ids: torch.Tensor  # [sessions, rows]
    positions: torch.Tensor  # [sessions, rows]
    slots: torch.Tensor  # [sessions, rows]
    wanted: torch.Tensor  # [sessions · rows]
    base: torch.Tensor  # [sessions]
    table: torch.Tensor  # [sessions, pages]
    sees: torch.Tensor  # [sessions, rows, rows]

    @classmethod
    def of(cls, whole: torch.Tensor, shape: GraphShape) -> _Fields:
        *rows, wanted, base, table, sees = torch.split_with_sizes(whole, _sizes(shape))
        ids, positions, slots = (each.view(shape.sessions, shape.rows) for each in rows)
        seen = sees.view(torch.bool)[: shape.all_rows * shape.rows].view(shape.sessions, shape.rows, shape.rows)
        return cls(ids, positions, slots, wanted, base, table.view(shape.sessions, -1), seen)


def _sizes(shape: GraphShape) -> list[int]:
    """Of the fields, in 8 bytes; who sees whom takes one."""
    rows = shape.all_rows
    return [rows, rows, rows, rows, shape.sessions, shape.sessions * shape.pages, -(-rows * shape.rows // 8)]


class GraphBucket:
    """One shape that is run again and again, and its graph."""

    def __init__(self, shape: GraphShape, skeleton: Decoder, scratch: int, device: torch.device) -> None:
        self._inputs = Padded(shape, scratch, device, pinned=device.type == "cuda")
        self._skeleton = skeleton
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Results | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def run(self, segments: Sequence[Segment]) -> Results:
        """Results of the wanted rows come first, those of padding after them."""
        self._inputs.send(segments)
        if self._graph is None or self._results is None:
            return self._step()
        self._graph.replay()
        return self._results

    def capture(self, stream: torch.cuda.Stream, memory: Any) -> None:
        """Without memory for it, the bucket goes on kernel by kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
            # The stream is named twice: the outer one is left whatever becomes of the capture.
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                self._inputs.send([])
                self._step()  # what libraries set up at first use cannot be captured
                stream.synchronize()
                with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                    self._results = self._step()
                stream.synchronize()
            self._graph = graph
        except RuntimeError as error:
            self._results = None
            log.warning("no graph for a shape: its steps are slower", shape=str(self._inputs.shape), reason=str(error))

    def _step(self) -> Results:
        ids, positions, slots = self._inputs.rows
        return self._skeleton.run(ids, positions, slots, self._inputs.wanted, [self._inputs.part(0)])


def _bucket(least: int) -> int:
    """The next power of two."""
    return 1 << (least - 1).bit_length()
