"""The engine that runs a model spec in a few fixed shapes: on a CUDA device each shape is one captured graph.

A step of few tokens takes a GPU less time than Python needs to launch its kernels one by one. Such a step is padded to
a bucket (sessions, new tokens of each, tokens of context). A bucket's kernels are captured once and then launched
together; the inputs go to the device in one copy. Steps of many tokens, such as prompts, run the same arithmetic
without padding or capture. On a CPU nothing is captured; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from outrider.engine.cuda.decoder import FEW_TOKENS, Decoder
from outrider.engine.cuda.padded_inputs import GraphShape, PaddedInputs
from outrider.engine.model_spec import ModelSpec
from outrider.engine.paged.block_manager import BLOCK_TOKENS, blocks_for
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.paged.step import ForwardStep, Segment, output_indices
from outrider.protocol.fleet import ModelInfo
from outrider.speculation.noise import to_device

_MAX_COPIED_BYTES = 1 << 30  # keys and values that attention copies at once
_BEYOND = 1024  # guesses reach past the end of the context by less than this
_MAX_PADDED_TOKENS = 16  # of a session that shares its attention with others outside a bucket
_MAX_BUCKETS = 96  # a graph of about six hundred kernels takes megabytes
_COMMON_TOKENS = (1, 2, 4, 8, 16, 32)
_COMMON_CONTEXTS = (256, 512, 1024)

Results = tuple[torch.Tensor, torch.Tensor]  # logits, hidden states

log = structlog.get_logger(__name__)


class CudaGraphEngine(PagedEngine):
    """An engine over a decoder and its graph buckets. A result of `extend` is valid until the next one."""

    def __init__(
        self, spec: ModelSpec, info: ModelInfo, *, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        super().__init__(info, spec.head.weight.device, kv_tokens, evictable_tokens)
        capacity = self.capacity_tokens
        positions = min(capacity, info.context_length + _BEYOND) if info.context_length else capacity
        self._scratch = capacity // BLOCK_TOKENS  # a block that padding writes to
        self.state_shape = (len(spec.layers), spec.hidden)
        self._decoder = Decoder(spec, capacity + BLOCK_TOKENS, positions)
        self.buckets: dict[GraphShape, GraphBucket] = {}  # the last used last
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None  # shared: graphs never run at the same time

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Capture the graphs of one session's common steps at start, not in the middle of a text."""
        if self.device.type != "cuda":
            return
        most = self.info.context_length or self.capacity_tokens
        contexts = [context for context in _COMMON_CONTEXTS if context // 2 < most]
        progress(f"capturing {len(contexts) * len(_COMMON_TOKENS)} graphs")
        for context in contexts:
            for tokens in _COMMON_TOKENS:
                self._bucket_of(GraphShape(1, tokens, context))

    @torch.inference_mode()
    def _run(self, step: ForwardStep) -> Results:
        shape = GraphShape.of(step.segments, step.layers)
        if shape.all_tokens <= FEW_TOKENS and self._fits(shape.sessions * shape.context):
            logits, hidden = self._bucket_of(shape).run(step.segments)
            return logits[: len(step.outputs)], hidden[: len(step.outputs)]
        return self._run_unpadded(step)

    def _copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        self._decoder.copy(old, new)

    def _fits(self, tokens: int) -> bool:
        return self._decoder.copied_bytes(tokens) <= _MAX_COPIED_BYTES

    def _bucket_of(self, shape: GraphShape) -> GraphBucket:
        bucket = self.buckets.pop(shape, None)
        if bucket is None:
            if len(self.buckets) == _MAX_BUCKETS:
                del self.buckets[next(iter(self.buckets))]
            bucket = GraphBucket(shape, self._decoder, self._scratch, self.device)
            if self._stream is not None and self._memory is not None:
                bucket.capture(self._stream, self._memory)
        self.buckets[shape] = bucket
        return bucket

    def _run_unpadded(self, step: ForwardStep) -> Results:
        """Run any number of tokens: prompts unpadded, other sessions padded to the same count."""
        first_of: dict[int, int] = {}
        first, parts, inputs = 0, [], []
        for segments in self._groups(step.segments):
            tokens = max(segment.count for segment in segments)
            longest = max(segment.base for segment in segments) + tokens
            padded = PaddedInputs(
                GraphShape(len(segments), tokens, blocks_for(longest) * BLOCK_TOKENS), self._scratch, self.device
            )
            padded.send(segments)
            first_of |= {segment.start: first + i * tokens for i, segment in enumerate(segments)}
            parts.append(padded.group(first))
            inputs.append(padded.tokens)
            first = parts[-1].end
        ids, positions, slots = torch.cat(inputs, dim=1)
        outputs = to_device(torch.tensor(output_indices(step.segments, first_of), dtype=torch.int64), self.device)
        return self._decoder.run(ids, positions, slots, outputs, parts, step.layers, step.num_logits)

    def _groups(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Return the sessions that attend together: prompts alone, others by length of context, as far as they fit."""
        groups: list[list[Segment]] = []
        together: list[Segment] = []
        for segment in sorted(segments, key=lambda segment: segment.base):
            if segment.count > _MAX_PADDED_TOKENS:
                groups.append([segment])
            elif together and not self._fits((len(together) + 1) * (segment.base + _MAX_PADDED_TOKENS)):
                groups.append(together)
                together = [segment]
            else:
                together.append(segment)
        return [*groups, together] if together else groups


class GraphBucket:
    """A shape that runs repeatedly, and its graph."""

    def __init__(self, shape: GraphShape, decoder: Decoder, scratch: int, device: torch.device) -> None:
        self._inputs = PaddedInputs(shape, scratch, device)
        self._decoder = decoder
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Results | None = None

    def run(self, segments: Sequence[Segment]) -> Results:
        """Run a step; the results of padding come after those of the outputs."""
        self._inputs.send(segments)
        if self._graph is None or self._results is None:
            return self._step()
        self._graph.replay()
        return self._results

    def capture(self, stream: torch.cuda.Stream, memory: Any) -> None:
        """Capture the graph. Where memory does not suffice, the bucket runs kernel by kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
            # The stream is named twice: the outer context leaves it even if the capture fails.
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                self._inputs.send([])
                self._step()  # initialisation of libraries at first use cannot be captured
                stream.synchronize()
                with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                    self._results = self._step()
                stream.synchronize()
            self._graph = graph
        except RuntimeError as error:
            self._results = None
            log.warning("graph capture failed, steps are slower", shape=str(self._inputs.shape), reason=str(error))

    def _step(self) -> Results:
        ids, positions, slots = self._inputs.tokens
        parts = [self._inputs.group(0)]
        return self._decoder.run(ids, positions, slots, self._inputs.outputs, parts, self._inputs.shape.layers)
