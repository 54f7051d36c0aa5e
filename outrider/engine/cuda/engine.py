"""The engine that runs a model spec on a CUDA device, its common steps as captured graphs.

A step of few tokens takes a GPU less time than Python needs to launch its kernels one by one. Such a step is padded to
the next number of tokens that has a graph: its kernels are captured once and then launched together. The inputs go to
the device in one copy. Larger steps, such as prompts, launch the same kernels without padding. On a CPU, in tests,
nothing is captured; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from outrider.engine.cuda.decoder import Decoder
from outrider.engine.cuda.step_inputs import FEW_TOKENS, InputSizes, QueryBlock, StepInputs, StepLayout
from outrider.engine.interface import SessionTokens
from outrider.engine.model_spec import ModelSpec
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.paged.step import ForwardStep
from outrider.protocol.fleet import ModelInfo

_BEYOND = 1024  # guesses reach past the end of the context by less than this
# Numbers of tokens that have a graph: padding costs less than a tenth of a step.
_CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_MAX_GRAPHS = 64  # a graph of about four hundred kernels takes megabytes
_FEW_LANES, _MANY_LANES = 16, 64  # of a program that attends: from few tokens and from many

log = structlog.get_logger(__name__)


class CudaGraphEngine(PagedEngine):
    """An engine over a decoder and its graphs. A result of `extend` is valid until the next one."""

    def __init__(
        self, spec: ModelSpec, info: ModelInfo, *, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        super().__init__(info, spec.head.weight.device, kv_tokens, evictable_tokens)
        capacity = self.capacity_tokens
        positions = min(capacity, info.context_length + _BEYOND) if info.context_length else capacity
        self._scratch = capacity // BLOCK_TOKENS  # a block that padding writes to
        self.state_shape = (len(spec.layers), spec.hidden)
        self._spec = spec
        self._decoder = Decoder(spec, capacity + BLOCK_TOKENS, positions)
        self._blocks = [QueryBlock.of(spec.heads // spec.kv_heads, lanes) for lanes in (_FEW_LANES, _MANY_LANES)]
        most = max(_CAPTURED)
        pages = min(capacity // BLOCK_TOKENS + 8 * most, 64 * most)
        self._inputs = self._make_inputs(InputSizes(most, 16 * most, 0, 16 * most, pages, 32 * most))
        self._logits = spec.head.weight.new_empty((most, len(spec.head.weight)))
        self.graphs: dict[GraphKey, Graph] = {}  # the last used last
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None  # shared: graphs never run at the same time

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Capture the graphs at start, not in the middle of a text: the largest first, whose memory the others use."""
        if self.device.type != "cuda":
            return
        progress(f"capturing {len(_CAPTURED)} graphs")
        for tokens in reversed(_CAPTURED):
            self._graph_of((tokens, ()))
        self.extend([SessionTokens("warm up", [0] * min(FEW_TOKENS + 1, self.capacity_tokens))])  # as a prompt
        self.free("warm up")

    @torch.inference_mode()
    def _run(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        layout = StepLayout(step, self._blocks)
        with torch.cuda.device_of(self._logits):  # type: ignore[no-untyped-call] # Triton launches on the current device
            if not layout.sizes.fit(self._inputs.sizes):
                inputs = self._make_inputs(layout.sizes)
                inputs.send(layout)
                logits = self._logits.new_empty((step.num_logits, self._logits.shape[1]))
                return logits, self._decoder.run(inputs, layout.sizes.tokens, len(step.outputs), step.layers, logits)
            tokens = next(each for each in _CAPTURED if each >= layout.sizes.tokens)
            graph = self._graph_of((tokens, step.layers))
            self._inputs.send(layout)
            return self._logits[: len(step.outputs)], graph.run()[: len(step.outputs)]

    def _copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        self._decoder.copy(old, new)

    def _make_inputs(self, sizes: InputSizes) -> StepInputs:
        return StepInputs(sizes, self._blocks, self._spec.heads, self._spec.head_dim, self._scratch, self.device)

    def _graph_of(self, key: GraphKey) -> Graph:
        graph = self.graphs.pop(key, None)
        if graph is None:
            if len(self.graphs) == _MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            tokens, layers = key

            def step() -> torch.Tensor:
                return self._decoder.run(self._inputs, tokens, tokens, layers, self._logits[:tokens])

            graph = Graph(step)
            self._inputs.send(None)  # a capture must not write into blocks of sessions
            if self._stream is not None and self._memory is not None:
                graph.capture(self._stream, self._memory, self.device)
        self.graphs[key] = graph
        return graph


GraphKey = tuple[int, tuple[int, ...]]  # tokens, and the layers after which states are captured


class Graph:
    """A step that runs repeatedly, captured or kernel by kernel."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self._step = step
        self._hidden = torch.empty(0)
        self.captured: torch.cuda.CUDAGraph | None = None

    def run(self) -> torch.Tensor:
        """Run the step, and return its hidden states; those of padding come after those of the outputs."""
        if self.captured is None:
            return self._step()
        self.captured.replay()
        return self._hidden

    def capture(self, stream: torch.cuda.Stream, memory: Any, device: torch.device) -> None:
        """Capture the graph. Where memory does not suffice, the step runs kernel by kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
            # The stream is named twice: the outer context leaves it even if the capture fails.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.device(device), torch.cuda.stream(stream):
                self._step()  # initialisation of libraries at first use cannot be captured
                stream.synchronize()
                with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                    self._hidden = self._step()
                stream.synchronize()
            self.captured = graph
        except RuntimeError as error:
            log.warning("graph capture failed, steps are slower", reason=str(error))
