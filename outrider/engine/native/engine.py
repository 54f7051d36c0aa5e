"""A plan run by the kernels of kernels.c: weights in panels, keys and values in pages."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.engine import model_spec as plans
from outrider.engine.block_manager import BLOCK_TOKENS
from outrider.engine.checks.arithmetic import of_kernels
from outrider.engine.model_spec import ModelSpec
from outrider.engine.native.build import library
from outrider.engine.paged import ForwardStep, PagedEngine
from outrider.protocol.fleet import ModelInfo

_LARGE_PAGE = 2 << 20
_BLOCK = 256 << 20
_LINE = 64
_KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
_NORMS = {"rms": 1, "layer": 2}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class _NativeNorm(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class _NativeLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "out", "up", "down")),
        *((name, _NativeNorm) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out", "query", "key")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("window", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_NativeLayer)),
        ("final", _NativeNorm),
        ("head", _Linear),
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("inner", "rotated", "gated", "activation", "parallel")),
        ("softcap", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class _Segment(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("base", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("table", ctypes.c_void_p),
        ("sees", ctypes.c_void_p),
        ("depths", ctypes.c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "num_segments", "num_wanted", "num_logits", "threads", "unused")),
        ("segments", ctypes.POINTER(_Segment)),
        ("wanted", ctypes.c_void_p),
        ("cos", ctypes.c_void_p * 2),
        ("sin", ctypes.c_void_p * 2),
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "hidden", "logits", "normed", "mixed", "inner", "attended", "scores")
        ),
        ("scores_per_thread", ctypes.c_int64),
    ]


class NativeEngine(PagedEngine):
    """`weights` is the format in which products read them; all arithmetic is in float32.

    A result of `extend` is good until the next one.
    """

    def __init__(
        self,
        plan: ModelSpec,
        info: ModelInfo,
        *,
        kv_tokens: int,
        evictable_tokens: int | None = None,
        weights: str = "float32",
        threads: int = 0,
    ) -> None:
        super().__init__(info, torch.device("cpu"), kv_tokens, evictable_tokens)
        self._library = library()
        self._threads = threads or torch.get_num_threads()
        self._inner, self._vocab = plan.inner, plan.head.weight.shape[0]
        self._panel = 2 * self._library.outrider_lanes()
        assert self._library.outrider_page() == BLOCK_TOKENS
        self._kept: list[torch.Tensor] = []  # memory that the kernels point into
        self._buffers: dict[str, torch.Tensor] = {}
        pages = self.capacity_tokens // BLOCK_TOKENS
        lanes = self._panel // 2
        dim_streams = 2 * -(-plan.head_dim // self._panel)
        self._memory = _PagedMemory(large_pages=True)  # weights are read as one stream
        # Every layer would come to its next large page in the same step, which then has 60 of them to clear.
        cache = _PagedMemory(large_pages=False)
        per_page = (len(plan.layers), pages, plan.kv_heads)
        self._keys = cache.take((*per_page, BLOCK_TOKENS // lanes, plan.head_dim, lanes), torch.float32)
        self._values = cache.take((*per_page, dim_streams, BLOCK_TOKENS, lanes), torch.float32)
        self._layers = (_NativeLayer * len(plan.layers))(
            *(self._layer(layer, i, weights) for i, layer in enumerate(plan.layers))
        )
        self._model = _Model(
            layers=self._layers,
            final=self._norm(plan.final),
            head=self._linear(plan.head, weights),
            num_layers=len(plan.layers),
            hidden=plan.hidden,
            heads=plan.heads,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            inner=plan.inner,
            rotated=plan.rotated,
            gated=plan.gated,
            activation=_ACTIVATIONS[plan.activation],
            parallel=plan.parallel,
            softcap=plan.softcap,
        )
        # The weights are packed: what is left of the plan must not keep the others in memory.
        self._plan = replace(plan, layers=(), head=plans.Linear(torch.empty(0)))

    @property
    def arithmetic(self) -> str:
        """Equal names, equal bits, on whatever machine."""
        return of_kernels(self._library.outrider_arithmetic())

    def _run(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        plan, rows, wanted = self._plan, len(step.ids), len(step.wanted)
        positions = torch.tensor(step.positions)
        if step.inputs is None:
            x = plan.embed(torch.tensor(step.ids), positions).float().contiguous()
        else:
            x = step.inputs.to(torch.float32, copy=True)  # the kernels add to it
        turns = [tuple(part.float().contiguous() for part in turn(positions)) for turn in plan.rotations]
        segments, alive = self._segments(step)
        longest = max(-(-(segment.base + segment.count) // BLOCK_TOKENS) * BLOCK_TOKENS for segment in step.segments)
        most = self._library.outrider_most_queries()
        mixed = (plan.heads + 2 * plan.kv_heads) * plan.head_dim
        dims = -(-plan.head_dim // self._panel) * self._panel
        per_thread = -(-most * (longest + plan.head_dim + dims + 2) // 64) * 64
        hidden = self._buffer("hidden", wanted, plan.hidden)
        logits = self._buffer("logits", step.num_logits, self._vocab)
        done = _Step(
            rows=rows,
            num_segments=len(step.segments),
            num_wanted=wanted,
            num_logits=step.num_logits,
            threads=self._threads,
            segments=segments,
            wanted=_address(alive, torch.tensor(step.wanted, dtype=torch.int32)),
            cos=(ctypes.c_void_p * 2)(*(cos.data_ptr() for cos, _ in turns)),
            sin=(ctypes.c_void_p * 2)(*(sin.data_ptr() for _, sin in turns)),
            x=x.data_ptr(),
            hidden=hidden.data_ptr(),
            logits=logits.data_ptr(),
            normed=self._buffer("normed", rows, plan.hidden).data_ptr(),
            mixed=self._buffer("mixed", rows, max(mixed, self._inner, plan.hidden)).data_ptr(),
            inner=self._buffer("inner", rows, self._inner * (2 if plan.gated else 1)).data_ptr(),
            attended=self._buffer("attended", rows, max(plan.heads * plan.head_dim, plan.hidden)).data_ptr(),
            scores=self._buffer("scores", self._threads, per_thread).data_ptr(),
            scores_per_thread=per_thread,
        )
        if self._library.outrider_forward(ctypes.byref(self._model), ctypes.byref(done)):
            raise MemoryError("no memory for a step")
        if plan.logit_softcap:
            self._library.outrider_cap(logits.data_ptr(), logits.numel(), plan.logit_softcap)
        return logits, hidden

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            self._keys[:, target] = self._keys[:, source]
            self._values[:, target] = self._values[:, source]

    def _move(self, old: Sequence[int], new: Sequence[int]) -> None:
        (from_page, from_at), (to_page, to_at) = _split(old), _split(new)
        lanes = self._panel // 2
        self._keys[:, to_page, :, to_at // lanes, :, to_at % lanes] = self._keys[
            :, from_page, :, from_at // lanes, :, from_at % lanes
        ]
        self._values[:, to_page, :, :, to_at] = self._values[:, from_page, :, :, from_at]

    def _segments(self, step: ForwardStep) -> tuple[Any, list[torch.Tensor]]:
        """For the kernels, and what must live as long as they look at it."""
        alive: list[torch.Tensor] = []
        made = (_Segment * len(step.segments))()
        for to, segment in zip(made, step.segments, strict=True):
            to.start, to.count, to.base = segment.start, segment.count, segment.base
            to.table = _address(alive, torch.tensor(segment.pages, dtype=torch.int32))
            if segment.rows.parents:
                to.sees = _address(alive, segment.sees().to(torch.uint8))
                to.depths = _address(alive, torch.tensor(segment.rows.depths(), dtype=torch.int32))
        return made, alive

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Scratch that grows and is never given back: fresh memory would cost page faults every step."""
        held = self._buffers.get(name)
        if held is None or held.numel() < rows * width:
            held = self._buffers[name] = torch.empty(max(1, rows * width))
        return held[: rows * width].view(rows, width)

    def _layer(self, layer: plans.Layer, index: int, weights: str) -> _NativeLayer:
        return _NativeLayer(
            **{name: self._linear(getattr(layer, name), weights) for name in ("qkv", "out", "up", "down")},
            **{
                name: self._norm(getattr(layer, name))
                for name in ("attention_in", "attention_out", "mlp_in", "mlp_out", "query", "key")
            },
            keys=self._keys[index].data_ptr(),
            values=self._values[index].data_ptr(),
            window=layer.window or 0,
            rope=-1 if layer.rope is None else layer.rope,
            scale=layer.scale,
        )

    def _linear(self, linear: plans.Linear, weights: str) -> _Linear:
        weight, scales = linear.weight.float(), None
        outputs, inputs = weight.shape
        if weights == "int8":
            scales = weight.abs().amax(dim=1).clamp_(min=1e-12) / 127
            weight = (weight / scales[:, None]).round_().to(torch.int8)
        elif weights == "bfloat16":
            weight = weight.to(torch.bfloat16)
        missing = -outputs % self._panel
        if missing:
            weight = torch.cat([weight, weight.new_zeros(missing, inputs)])
        packed = self._memory.take((len(weight) // self._panel, 2, inputs, self._panel // 2), weight.dtype)
        packed.copy_(weight.view(-1, 2, self._panel // 2, inputs).transpose(2, 3))
        return _Linear(
            weights=_address(self._kept, packed),
            scales=_address(self._kept, scales),
            bias=_address(self._kept, None if linear.bias is None else linear.bias.float()),
            inputs=inputs,
            outputs=outputs,
            kind=_KINDS[weights],
        )

    def _norm(self, norm: plans.Norm | None) -> _NativeNorm:
        if norm is None:
            return _NativeNorm()
        return _NativeNorm(
            weight=_address(self._kept, norm.weight),
            bias=_address(self._kept, norm.bias),
            eps=norm.eps,
            kind=_NORMS[norm.kind],
        )


class _PagedMemory:
    """Zeros, in large pages where the system has them and they are wanted: a stream of small ones waits for address
    look-ups.

    What was never written costs nothing: it is the system's until then.
    """

    def __init__(self, *, large_pages: bool) -> None:
        self._advice = "MADV_HUGEPAGE" if large_pages else "MADV_NOHUGEPAGE"
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._block.numel():
            self._block = self._map(max(size, _BLOCK))
            self._used = 0
        taken = self._block[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // _LINE) * _LINE
        return taken

    def _map(self, size: int) -> torch.Tensor:
        mapped = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, self._advice):
            mapped.madvise(getattr(mmap, self._advice))
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        start = -whole.data_ptr() % _LARGE_PAGE
        return whole[start : start + size]


def _address(keeper: list[torch.Tensor], tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    keeper.append(tensor)
    return tensor.data_ptr()


def _split(slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    held = torch.tensor(slots)
    return held // BLOCK_TOKENS, held % BLOCK_TOKENS
