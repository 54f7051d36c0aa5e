"""Forward passes of one engine in this process, of transformers, and the machine's memory and matmul throughput."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from outrider.bench.common.report import Times
from outrider.bench.engine.results import BASE_CONTEXT, MOST_NEW_TOKENS, EngineExtent, PassTimes, some_tokens
from outrider.engine.interface import Engine, SessionTokens, prefill
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions, pick_device, pick_dtype
from outrider.engine.native import NativeEngine
from outrider.engine.native.build import find_library
from outrider.launch.stack import LaunchPlan
from outrider.models.hub import locate_safetensors
from outrider.models.pretrained import load_whole
from outrider.protocol.errors import StartupError
from outrider.speculation.acceptance import likeliest

Key = tuple[str, int, int]  # kind of step, context, number of tokens or sessions
Step = Callable[[], float]  # runs one step, returns its milliseconds
Notify = Callable[[str], None]

_EAGER: Key = ("eager", BASE_CONTEXT, 1)
_READ: Key = ("read", 0, 0)
_PRODUCT: Key = ("product", 0, 0)
_MIB = 1 << 20
_READ_BYTES = 2 << 30  # far above any CPU cache
_MEMORY_SHARE = 8  # upper limit: this fraction (1/8) of the machine's memory
_SIDE = {"cpu": 2048, "cuda": 8192}  # of square matrices, large enough for full speed


def measure(plan: LaunchPlan, extent: EngineExtent, notify: Notify) -> PassTimes:
    """Load the engine and measure its steps, from the longest context to the shortest.

    transformers and the machine's throughput are measured in turn with the shortest one: ratios compare figures of
    the same minutes.
    """
    memory = {"before_loading": _resident_mb()}
    engine = _load(plan, extent, notify)
    memory["after_loading"] = _resident_mb()
    runner = _StepRunner(engine)
    taken: dict[Key, Times] = {}
    for context in reversed(extent.contexts_of(engine.info.context_length)[1:]):
        steps = runner.steps(extent, context, notify)
        taken |= _alternate(steps, extent.rounds)
    steps = runner.steps(extent, BASE_CONTEXT, notify)
    _alternate(steps, 1)
    memory["after_runs"] = _resident_mb()  # every step has run, and transformers is not loaded yet
    if engine.device.type == "cuda":
        memory["cuda_peak"] = torch.cuda.max_memory_allocated(engine.device) / 1e6

    eager = _Eager(plan, runner.prompt(0, BASE_CONTEXT), notify)
    read_bytes, steps[_READ] = _memory_read(engine.device)
    product_flop, steps[_PRODUCT] = _matmul(engine.device, eager.dtype)
    taken |= _alternate({**steps, _EAGER: eager.step}, extent.rounds)
    stored, cached = eager.dtype.itemsize * eager.weights(), eager.dtype.itemsize
    if isinstance(engine, NativeEngine):
        stored, cached = engine.weight_bytes, engine.cache_dtype.itemsize
    return PassTimes(
        name=engine.info.name,
        engine=type(engine).__name__,
        weights=engine.info.dtype,
        device=str(engine.device),
        threads=torch.get_num_threads(),
        verification={(context, new): times for (kind, context, new), times in taken.items() if kind == "verify"},
        batch={(context, count): times for (kind, context, count), times in taken.items() if kind == "decode"},
        eager=taken[_EAGER],
        read=taken[_READ],
        read_bytes=read_bytes,
        product=taken[_PRODUCT],
        product_flop=product_flop,
        token_bytes=stored + cached * eager.cached(),
        memory_mb=memory,
    )


def release() -> None:
    """Free memory before another process loads the same model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load(plan: LaunchPlan, extent: EngineExtent, notify: Notify) -> Engine:
    if plan.threads:
        torch.set_num_threads(plan.threads)
    options = EngineOptions(
        device=plan.device,
        dtype=plan.dtype,
        quantization=plan.quantization,
        engine=plan.engine,
        threads=plan.threads,
        kv_tokens=extent.kv_tokens,
        prefix_tokens=0,
    )
    engine = load_model(plan.target, options, notify).engine
    needed, context = BASE_CONTEXT + MOST_NEW_TOKENS, engine.info.context_length
    if context < needed:
        raise StartupError(f"{engine.info.name} has a context of {context} tokens, this needs {needed}")
    return engine


class _StepRunner:
    """Sessions with distinct tokens, all at one context. Each step is rolled back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: list[str] = []
        self._context = 0

    def prompt(self, index: int, length: int) -> list[int]:
        return some_tokens(f"session {index}", length, self._engine.info.vocab_size)

    def steps(self, extent: EngineExtent, context: int, notify: Notify) -> dict[Key, Step]:
        """Return the steps of both curves at one context."""
        counts = extent.sessions_at(context)
        notify(f"filling caches: {counts[-1]} sessions of {context} tokens")
        self._fill(counts[-1], context)
        notify(f"steps at a context of {context}")
        steps: dict[Key, Step] = {("verify", context, new): self._verify(new) for new in extent.new_tokens}
        return steps | {("decode", context, count): self._decode(count) for count in counts}

    def _fill(self, count: int, context: int) -> None:
        """Fill the caches of `count` sessions up to `context` tokens. Cached tokens are kept."""
        for session in self._sessions[count:]:
            self._engine.free(session)
        self._sessions = [f"bench-{i}" for i in range(count)]
        self._context = context
        for i, session in enumerate(self._sessions):
            self._engine.truncate(session, context)
            prefill(self._engine, session, self.prompt(i, context)[self._engine.length(session) :])

    def _verify(self, new_tokens: int) -> Step:
        """Return the step of one session with a chain of new tokens."""
        tokens = some_tokens("guesses", new_tokens, self._engine.info.vocab_size)
        return self._step([SessionTokens(self._sessions[0], tokens)], draw=False)

    def _decode(self, count: int) -> Step:
        """Return the step of `count` sessions with one new token each, and a greedy draw for each."""
        tokens = some_tokens("next", count, self._engine.info.vocab_size)
        pairs = zip(self._sessions, tokens, strict=False)
        return self._step([SessionTokens(session, [token]) for session, token in pairs], draw=True)

    def _step(self, batch: list[SessionTokens], *, draw: bool) -> Step:
        def run() -> None:
            logits = self._engine.extend(batch).all_logits
            if draw:
                likeliest(logits).tolist()

        def step() -> float:
            taken = _milliseconds(self._engine.device, run)
            for each in batch:
                self._engine.truncate(each.session, self._context)
            return taken

        return step


class _Eager:
    """The same weights in transformers, with its default eager execution."""

    def __init__(self, plan: LaunchPlan, prompt: list[int], notify: Notify) -> None:
        self._device = pick_device(plan.device, plan.engine)
        self.dtype = pick_dtype(plan.dtype, self._device)
        folder = locate_safetensors(plan.target, notify)
        model = load_whole(plan.target, folder, dtype=self.dtype, attn_implementation="sdpa")
        self._model: Any = model.to(self._device).eval()
        self._cache: Any = DynamicCache(config=model.config)
        self._next = torch.tensor([[prompt[-1]]], device=self._device)
        self._forward(torch.tensor([prompt], device=self._device))

    def step(self) -> float:
        taken = _milliseconds(self._device, lambda: self._forward(self._next))
        self._cache.crop(-1)
        return taken

    def weights(self) -> int:
        """Return the number of weights in linear layers. A token reads each of them once."""
        kinds = (torch.nn.Linear, Conv1D)
        return sum(module.weight.numel() for module in self._model.modules() if isinstance(module, kinds))

    def cached(self) -> int:
        """Return the number of values in the KV cache of the context."""
        return sum(layer.keys.numel() + layer.values.numel() for layer in self._cache.layers)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)


def _alternate(steps: Mapping[Key, Step], rounds: int) -> dict[Key, Times]:
    """Run the steps alternately: other load on the machine affects all equally. The first round warms caches."""
    taken: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(rounds + 1):
        for key, step in steps.items():
            milliseconds = step()
            if number:
                taken[key].append(milliseconds)
    return {key: Times(ms) for key, ms in taken.items()}


def _milliseconds(device: torch.device, run: Callable[[], object]) -> float:
    _synchronize(device)
    started = time.perf_counter()
    run()
    _synchronize(device)
    return 1000 * (time.perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    """Wait for the GPU: kernels run asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_read(device: torch.device) -> tuple[int, Step]:
    """Return a number of bytes, and a step that reads them, with the engine's own kernel if it is available."""
    if device.type == "cuda":
        data = torch.ones(_READ_BYTES // 4, device=device)
        return _READ_BYTES, lambda: _milliseconds(device, data.sum)
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    size = min(_READ_BYTES, memory // _MEMORY_SHARE) // _MIB * _MIB
    # Huge pages, as for the engine's weights: small ones lower the measured bandwidth.
    mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(mapped, dtype=torch.float32).fill_(1.0)
    if isinstance(kernels := find_library(), str):
        return size, lambda: _milliseconds(device, data.sum)
    read = kernels.outrider_read
    read.restype = ctypes.c_float
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return size, lambda: _milliseconds(device, lambda: read(data.data_ptr(), data.numel(), torch.get_num_threads()))


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[int, Step]:
    side = _SIDE[device.type]
    left, right = (torch.rand((side, side), device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(left)
    return 2 * side**3, lambda: _milliseconds(device, lambda: torch.mm(left, right, out=into))


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6
