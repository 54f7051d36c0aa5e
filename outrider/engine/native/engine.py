"""The engine that runs a model spec with the CPU kernels: weights in panels, keys and values in blocks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from outrider.engine import model_spec as specs
from outrider.engine.interface import SessionTokens, StepResult
from outrider.engine.model_spec import ModelSpec, head_format
from outrider.engine.native.build import find_library, library, structures
from outrider.engine.paged.arithmetic import kernel_arithmetic
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.engine.paged.engine import PagedEngine
from outrider.engine.paged.step import ForwardStep
from outrider.models.in_place import NUMBERS, QuantizedRows, rows_of
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo

_LARGE_PAGE = 2 << 20
_MAPPING = 256 << 20
_LINE = 64
KINDS = {"float32": 0, "bfloat16": 1, "int4": 2, "int8": 3}  # formats of weights
_FLOATS, _TILES, _INTEGERS = range(3)
_NAMES = {_TILES: "tiles 2", _INTEGERS: "integers 1"}  # with the version of their bits
_NORMS = {"rms": 1, "layer": 2}
_LAYER_NORMS = ("attention_in", "attention_out", "mlp_in", "mlp_out", "query", "key")
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
_SAME = ("hidden", "heads", "kv_heads", "head_dim", "inner", "rotated", "gated", "parallel", "softcap")
_C = structures()
_Draws = tuple[float, Sequence[int]]  # of a chain's tokens: temperature, and the key of each one's noise
_COMPARED_ROWS = 4
_compared: set[int] = set()  # block formats, in this process


class NativeEngine(PagedEngine):
    """An engine over the CPU kernels. Products read weights in the format `weights`; all arithmetic is in float32.

    Unless `exact`, products of GGUF blocks, int8 and int4 weights run in integers, and those of bfloat16 weights in AMX
    tiles where there are any.
    A result of `extend` is valid until the next one. `reduced`: no linear map is held in float32.
    """

    def __init__(
        self,
        spec: ModelSpec,
        info: ModelInfo,
        *,
        kv_tokens: int,
        evictable_tokens: int | None = None,
        weights: str = "float32",
        threads: int = 0,
        exact: bool = True,
    ) -> None:
        super().__init__(info, torch.device("cpu"), kv_tokens, evictable_tokens)
        self._library = library()
        self._fast, self._tiles = not exact, not exact and bool(self._library.outrider_tiles())
        self._used, self.reduced = {_FLOATS}, True
        self._threads = threads or torch.get_num_threads()
        self._weights = weights
        assert self._library.outrider_page() == BLOCK_TOKENS
        self._referenced: list[torch.Tensor] = []  # memory that the kernels' structures point into
        self._step = _C.Step(threads=self._threads)
        self._buffers: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}
        self._rotations: dict[int, list[torch.Tensor]] = {}  # cosines and sines by position
        self._memory = _MappedMemory()  # weights are read as one stream
        self._layers = (_C.Layer * len(spec.layers))(*(self._layer(layer, weights) for layer in spec.layers))
        self._model = _C.Model(
            layers=ctypes.addressof(self._layers),
            final=self._norm(spec.final),
            head=self._linears(spec.head, head_format(weights))[0],
            num_layers=len(spec.layers),
            activation=_ACTIVATIONS[spec.activation],
            **{name: getattr(spec, name) for name in _SAME},
        )
        self.state_shape = (len(spec.layers), spec.hidden)
        self.use_cache(torch.float32)
        self.weight_bytes, self.in_integers = self._memory.taken, _INTEGERS in self._used
        # The weights are packed: drop the references to the originals.
        self._spec = replace(spec, layers=(), head=specs.Linear(torch.empty(0)))

    @property
    def arithmetic(self) -> str:
        parts = [_NAMES[kind] for kind in sorted(self._used - {_FLOATS})]
        if self.cache_dtype == torch.bfloat16:
            parts.append("bfloat16 cache in tiles 1" if self._model.tiled_cache else "bfloat16 cache")
        return kernel_arithmetic(self._library.outrider_arithmetic(), *parts)

    def use_cache(self, dtype: torch.dtype) -> None:
        """Replace the cache, which no session may use, by an empty one of float32 or bfloat16."""
        assert not self.blocks.pool.num_used
        self.blocks.pool.evict_all()
        self.cache_dtype, model = dtype, self._model
        model.cache_bytes, model.tiled_cache = dtype.itemsize, self._tiles and dtype == torch.bfloat16
        multiples = (32, 16) if model.tiled_cache else (1, 2 * self._library.outrider_lanes())  # of the dimensions
        # The layers of a block lie together: apart, a step that reaches a new block would clear a large page for each.
        memory = _MappedMemory()
        blocks = (self.capacity_tokens // BLOCK_TOKENS, model.num_layers, model.kv_heads)
        sizes = (BLOCK_TOKENS * multiple * -(-model.head_dim // multiple) for multiple in multiples)
        try:
            self._keys, self._values = (memory.take((*blocks, size), dtype).transpose(0, 1) for size in sizes)
        except OSError as error:
            raise StartupError.of("kv_tokens", self.capacity_tokens, "fewer", f": {error.strerror}") from error
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def prepare_chain(self, inputs: torch.Tensor, mix: torch.Tensor, ids: torch.Tensor) -> Any:
        """Return what `chain` needs: tokens' parts of its input, the linear map of the state, and ids of columns."""
        head = self._model.head
        if self._library.outrider_guesses(ctypes.byref(head)):
            sizes = {"inputs": head.inputs, "outputs": head.outputs, "bias": head.bias, "kind": KINDS["int4"]}
            self._model.rough = self._take(_C.Linear(**sizes, arithmetic=_INTEGERS), 0)
            self._library.outrider_make_rough(ctypes.byref(self._model), self._threads)
        parts = {"inputs": self._address(inputs.float()), "ids": self._address(ids)}
        return _C.Chain(mix=self._linear(specs.Linear(mix), self._weights), **parts)

    @torch.inference_mode()
    def chain(
        self, chain: Any, session: str, states: torch.Tensor, tokens: Sequence[int], count: int, draws: _Draws
    ) -> tuple[list[int], StepResult]:
        """Continue a session by tokens, given by their columns of the logits, and by the likeliest ones after them.

        Return the columns of `count` further tokens, and the results from the last given token on. `states` are the
        hidden states before the given tokens. The columns are guesses: logits of unlikely ones are rough.
        """
        given, states, (temperature, keys) = len(tokens), states.contiguous(), draws
        assert states.shape == (given, self._spec.hidden), "the kernels read a state before each given token"
        rows = given + count - 1
        columns = (ctypes.c_int32 * (rows + 1))(*tokens)
        noise = (ctypes.c_uint64 * len(keys))(*keys)
        chain.given, chain.states, chain.columns = given, states.data_ptr(), ctypes.addressof(columns)
        chain.temperature, chain.keys = temperature, ctypes.addressof(noise)
        inputs, last = torch.empty(rows, self._spec.hidden), given - 1
        new = SessionTokens(session, range(rows), logits_from=last, hidden_from=last, input_embeddings=inputs)
        step = self._schedule([new])
        result = step.result(*self._run(step, ctypes.byref(chain)))
        self.blocks.append(session, columns[:rows])
        return columns[given:], result

    def _run(self, step: ForwardStep, *chain: Any) -> tuple[torch.Tensor, torch.Tensor]:
        spec, args, outputs = self._spec, self._step, len(step.outputs)
        self._rotate(max(step.positions))
        logits, args.logits = self._buffer("logits", step.num_logits, self._model.head.outputs)
        hidden, args.hidden = self._buffer("hidden", outputs, spec.hidden)
        args.rows, args.num_wanted, args.num_logits = len(step.ids), outputs, step.num_logits
        args.num_states, args.guesses, args.exact = len(step.layers), bool(chain), self.exact
        if step.layers:
            states, layers = torch.empty(outputs, len(step.layers) * spec.hidden), array("i", step.layers)
            args.states, args.layers = states.data_ptr(), layers.buffer_info()[0]
        inputs, args.x = self._inputs(step)
        placed = self._place(step)
        scratch = self._library.outrider_scratch(ctypes.byref(self._model), ctypes.byref(args))
        _, args.scratch = self._buffer("scratch", 1 << scratch.bit_length(), 1)
        run = self._library.outrider_chain if chain else self._library.outrider_forward
        if run(ctypes.byref(self._model), ctypes.byref(args), *chain):
            raise MemoryError("no memory for a step")
        del inputs, placed  # which the kernels read
        if spec.logit_softcap:
            self._library.outrider_cap(args.logits, logits.numel(), spec.logit_softcap)
        return logits, torch.cat([hidden, states], dim=1) if step.layers else hidden

    def _inputs(self, step: ForwardStep) -> tuple[torch.Tensor, int]:
        """Return the inputs of the first layer, which the kernels write to, and their address."""
        table: QuantizedRows | None = getattr(self._spec.table, "rows", None)
        if step.input_embeddings is None and table is not None:  # without torch, whose first use in a step takes long
            x, to = self._buffer("x", len(step.ids), table.inputs)
            numbers = (table.inputs, (ctypes.c_int64 * len(step.ids))(*step.ids), len(step.ids))
            rows = (ctypes.c_void_p(table.stored.data_ptr()), len(table.stored))
            if self._library.outrider_dequantise(table.kind, *rows, *numbers, ctypes.c_void_p(to), self._threads):
                raise IndexError("a token without an embedding")
            return x, to
        given = step.input_embeddings
        x = self._spec.embed(torch.tensor(step.ids), torch.tensor(step.positions)) if given is None else given
        x = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return x, x.data_ptr()

    def _rotate(self, last: int) -> None:
        """Extend the tables of cosines and sines to a position."""
        for number, rotate in enumerate(self._spec.rotations):
            if number not in self._rotations or last >= len(self._rotations[number][0]):
                made = [part.float().contiguous() for part in rotate(torch.arange(2 * last + 1))]
                self._step.cos[number], self._step.sin[number] = (part.data_ptr() for part in made)
                self._rotations[number] = made

    def _copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        slots = [(ctypes.c_int32 * len(old))(*each) for each in (old, new)]
        self._library.outrider_copy(ctypes.byref(self._model), *slots, len(old))

    def _place(self, step: ForwardStep) -> tuple[Any, array[int]]:
        """Tell the kernels where each segment is. Return what must stay alive while they read it."""
        numbers, tables = array("i", step.positions + step.outputs), []
        for segment in step.segments:
            tables.append(len(numbers))
            numbers.extend([*segment.blocks, *(position - segment.base for position in segment.positions)])
        segments, args, start = (_C.Segment * len(tables))(), self._step, numbers.buffer_info()[0]
        for to, segment, table in zip(segments, step.segments, tables, strict=True):
            to.start, to.count, to.base, to.table = segment.start, segment.count, segment.base, start + 4 * table
            if segment.mask is not None:
                to.sees, to.depths = segment.mask.data_ptr(), to.table + 4 * len(segment.blocks)
        args.segments, args.num_segments = ctypes.addressof(segments), len(tables)
        args.positions, args.wanted = start, start + 4 * len(step.positions)
        return segments, numbers

    def _buffer(self, name: str, height: int, width: int) -> tuple[torch.Tensor, int]:
        """Return scratch memory and its address. It is never released: fresh memory and new tensors take long."""
        if (name, height) not in self._buffers:
            with torch.inference_mode():
                part = height & (height - 1)  # of the next power of two
                whole = self._buffer(name, 1 << height.bit_length(), width)[0] if part else torch.empty(height, width)
                self._buffers[name, height] = whole[:height], whole.data_ptr()
        return self._buffers[name, height]

    def _layer(self, layer: specs.Layer, weights: str) -> Any:
        return _C.Layer(
            **{name: self._linears(getattr(layer, name), weights) for name in ("qkv", "out", "up", "down")},
            **{name: self._norm(getattr(layer, name)) for name in _LAYER_NORMS},
            window=layer.window or 0,
            rope=-1 if layer.rope is None else layer.rope,
            scale=layer.scale,
        )

    def _linears(self, linear: specs.Linear, weights: str) -> Any:
        """Return the parts of a linear map, of which there are several where rows are of several kinds."""
        alike = [tuple(group) for _, group in groupby(linear.quantized, key=lambda rows: rows.kind)]
        sizes = [sum(len(rows.stored) for rows in group) for group in alike] or [len(linear.weight)]
        biases = [None] * len(sizes) if linear.bias is None else torch.split(linear.bias, sizes)
        parts = zip(torch.split(linear.weight, sizes), biases, alike or [()], strict=True)
        return (_C.Linear * 3)(*(self._linear(specs.Linear(*part), weights) for part in parts))

    def _linear(self, linear: specs.Linear, weights: str) -> Any:
        outputs, inputs = linear.weight.shape
        sources = linear.quantized or (rows_of(linear.weight),)
        kind, data = sources[0].kind, ctypes.c_void_p(sources[0].stored.data_ptr())
        made = _C.Linear(inputs=inputs, outputs=outputs, kind=KINDS[weights])
        made.bias = self._address(None if linear.bias is None else linear.bias.float())
        if weights == "int8":
            made.scales = self._address(torch.empty(outputs))
        in_blocks = weights in ("int8", "int4")
        if weights == "float32":  # as they are
            in_blocks = kind not in NUMBERS.values()
            if self._tiles and not in_blocks and self._library.outrider_are_bfloat16(kind, data, outputs, inputs):
                made.kind = KINDS["bfloat16"]
        made.arithmetic = _INTEGERS if self._fast and in_blocks else _TILES if self._tiles and made.kind else _FLOATS
        self._take(made, kind)
        self._used.add(made.arithmetic)
        self.reduced = self.reduced and made.kind > 0
        first = 0
        for source in sources:
            rows = source.rows
            data = ctypes.c_void_p(rows.data_ptr())
            self._library.outrider_pack(kind, data, ctypes.byref(made), first, len(rows), self._threads)
            first += len(rows)
            if source.file:
                source.file.madvise(mmap.MADV_DONTNEED)  # what was read of it is packed
        return made

    def _take(self, linear: Any, kind: int) -> Any:
        """Take memory for weights that come in a format of ggml. Return the linear map."""
        size = self._library.outrider_packed_size(kind, ctypes.byref(linear))
        linear.weights = self._address(self._memory.take((size,), torch.uint8))
        return linear

    def _norm(self, norm: specs.Norm | None) -> Any:
        if norm is None:
            return _C.Norm()
        vectors = {"weight": self._address(norm.weight), "bias": self._address(norm.bias)}
        return _C.Norm(eps=norm.eps, kind=_NORMS[norm.kind], **vectors)

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        """Return a tensor's address, and keep the tensor alive."""
        if tensor is None:
            return None
        self._referenced.append(tensor.contiguous())
        return int(self._referenced[-1].data_ptr())


def dequantize(quantized: QuantizedRows, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows as float32; None: all."""
    if isinstance(kernels := find_library(), str):
        return quantized.dequantize(ids)
    rows = quantized.rows
    ids = torch.arange(len(rows)) if ids is None else ids
    made = torch.empty(len(ids), quantized.inputs)
    stored, wanted, to = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, ids, made))
    numbers = (len(rows), quantized.inputs, wanted, len(ids), to)
    if kernels.outrider_dequantise(quantized.kind, stored, *numbers, torch.get_num_threads()):
        raise IndexError("an id without a row")
    if quantized.kind not in _compared:  # the start-up check takes these rows as its reference
        few = quantized.dequantize(ids[:_COMPARED_ROWS])
        if not torch.allclose(few, made[:_COMPARED_ROWS], rtol=0.0, atol=0.0, equal_nan=True):
            raise StartupError(f"the kernels dequantise format {quantized.kind} of ggml in another way than gguf does")
        _compared.add(quantized.kind)
    return made


class _MappedMemory:
    """Zeroed memory, in large pages if possible (small ones cost address look-ups); unwritten parts take no room."""

    def __init__(self) -> None:
        self._mapping = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.taken = 0  # bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        self.taken += size
        if self._used + size > self._mapping.numel():
            room = max(size, _MAPPING)
            mapped = mmap.mmap(-1, room + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):  # not every system, nor kernel, has large pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
            start = -whole.data_ptr() % _LARGE_PAGE
            self._mapping, self._used = whole[start : start + room], 0
        tensor = self._mapping[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // _LINE) * _LINE
        return tensor
