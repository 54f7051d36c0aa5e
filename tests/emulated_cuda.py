"""An emulated CUDA device: it computes on the CPU, refuses to mix devices, and counts launches and synchronisations.

Product code runs on it unchanged. Tensors stay ordinary tensors of the CPU;
the device is a set of storages, so a view is where its memory is. A mode for
functions answers what code asks about devices and moves tensors. A mode for
operations checks where the tensors of each operation are, and counts it.

What it does not show: speed, memory that runs out, kernels of CUDA's own
libraries, and races between streams.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.cuda import decoder
from outrider.engine.cuda.step_inputs import StepInputs
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.speculation import noise, triton_race

CUDA = torch.device("cuda", 0)

_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
_NO_KERNEL = {
    "detach_",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "alias",
    "lift_fresh",
    "_unsafe_view",
}
_FUSED = {"rms_norm", "scaled_dot_product_attention"}  # one kernel on CUDA, several operations on the CPU
_MADE_FROM_HOST = {"tensor", "as_tensor", "new_tensor"}
_SWEEP = 4096


class DeviceMismatch(RuntimeError):
    """Tensors of the host and of the device met in one operation."""


@dataclass
class Counts:
    """Launches by operation, synchronisations by cause, and replays of graphs, each of which is one launch more."""

    launches: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    replays: int = 0

    @property
    def all_launches(self) -> int:
        return self.launches.total() + self.replays


class _Storages:
    """A set of storages that does not keep them alive."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again
        self._sweep_at = _SWEEP

    def add(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = reference
        if len(self._known) > self._sweep_at:
            self._known = {key: each for key, each in self._known.items() if not each.expired()}
            self._sweep_at = 2 * len(self._known) + _SWEEP

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._known


class EmulatedDevice:
    """The device: its memory and its counts."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.waits = 0  # synchronisations since the start
        self.free_bytes = 1 << 30  # what code is told
        self.captured: list[tuple[Any, ...]] | None = None  # the operations since a capture began
        self.making = False  # tensors made now are the device's
        self.moving = False  # operations now are copies, which `_Functions` counts
        self._memory = _Storages()
        self._pinned = _Storages()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor in self._memory

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return CUDA if self.holds(tensor) else torch.device(tensor.device.type)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        self._memory.add(tensor)
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor)
        return tensor

    def wait(self, cause: str) -> None:
        """Count a synchronisation. CUDA allows none while it captures."""
        if self.captured is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {cause}")
        self.counts.syncs[cause] += 1
        self.waits += 1

    def copied(self, source: torch.Tensor, there: bool, non_blocking: bool) -> None:
        """Count a copy between host and device, to the device if `there`."""
        if not (non_blocking and source in self._pinned):
            self.wait("copy to the device" if there else "copy to the host")
        else:
            self.counts.launches["copy to the device"] += 1

    @contextlib.contextmanager
    def doing(self, **what: bool) -> Iterator[None]:
        before = {name: getattr(self, name) for name in what}
        self.__dict__.update(what)
        try:
            yield
        finally:
            self.__dict__.update(before)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_of(each)
    elif isinstance(value, dict):
        yield from _tensors_of([*value.values()])


class _Operations(TorchDispatchMode):
    """Checks and counts the operations on tensors of the device."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, name = self._device, func.overloadpacket.__name__
        tensors = [*_tensors_of(args), *_tensors_of(kwargs)]
        if device.moving or not (device.making or any(map(device.holds, tensors))):
            return func(*args, **kwargs)
        if func._can_decompose() and name not in _FUSED:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        self._check(name, tensors, args)
        out = func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return out
        if name != "copy_" or device.holds(args[0]):
            for made in _tensors_of(out):
                device.place(made)
        if not func.is_view and name not in _NO_KERNEL:
            device.counts.launches[name] += 1
            if device.captured is not None:
                device.captured.append((func, args, kwargs, out))
        return out

    def _check(self, name: str, tensors: Sequence[torch.Tensor], args: Any) -> None:
        """Raise DeviceMismatch unless all tensors are on the device. Numbers may be anywhere, and so may indices."""
        device = self._device
        if name in _WAITING:
            device.wait(name)
        elsewhere = [each for each in tensors if not device.holds(each) and each.dim() > 0]
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [each for each in args[1] if each is not None]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                device.wait("index by a mask")
            if device.holds(args[0]) and any(each is index for each in elsewhere for index in indices):
                device.wait("index from the host")
                elsewhere = [each for each in elsewhere if not any(each is index for index in indices)]
        if elsewhere and name == "copy_":  # of an assignment: `there[rows] = here`
            device.wait("copy by assignment")
        elif elsewhere and not device.making:
            raise DeviceMismatch(f"{name} got tensors on the device and on the host")


class _Functions(TorchFunctionMode):
    """Answers what code asks about devices, and moves tensors."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: device.device_of,
            torch.Tensor.is_cuda.__get__: device.holds,
            torch.Tensor.is_cpu.__get__: lambda tensor: device.device_of(tensor).type == "cpu",
            torch.Tensor.get_device: lambda tensor: 0 if device.holds(tensor) else -1,
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda tensor, *_, **more: self._move(tensor, CUDA, **more),
            torch.Tensor.cpu: lambda tensor, **_: self._move(tensor, torch.device("cpu")),
            torch.Tensor.copy_: self._copy_,
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.Tensor.pin_memory: lambda tensor, *_: device.pin(tensor.clone()),
            torch.Tensor.is_pinned: lambda tensor, *_: tensor in device._pinned,
            torch.Tensor.tolist: self._tolist,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: self._array,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        name = getattr(func, "__name__", "")
        there = self._is_made_there(name, args, kwargs)
        if there:
            kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", False)
        with self._device.doing(making=True) if there else contextlib.nullcontext():
            out = func(*args, **kwargs)
        if there and name in _MADE_FROM_HOST:
            self._device.wait("copy to the device")
        if there:
            self._device.place(out)
        return self._device.pin(out) if pinned else out

    def _is_made_there(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether a function makes a tensor on the device."""
        wanted = kwargs.get("device")
        if wanted is not None:
            return torch.device(wanted).type == "cuda" if not isinstance(wanted, int) else True
        return name.startswith("new_") and self._device.holds(args[0])

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            return self._move(tensor, self._device.device_of(args[0]), args[0].dtype, copy=copy, **kwargs)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._move(tensor, device, dtype, non_blocking, copy)

    def _move(
        self,
        tensor: torch.Tensor,
        wanted: torch.device | None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> torch.Tensor:
        device, dtype = self._device, dtype or tensor.dtype
        here = device.holds(tensor)
        there = here if wanted is None else wanted.type == "cuda"
        if wanted is not None and wanted.type not in ("cpu", "cuda"):
            return tensor.to(wanted, dtype)
        if here == there:
            return tensor.to(dtype, copy=copy)
        device.copied(tensor, there, non_blocking)
        with device.doing(moving=True):
            out = tensor.to(dtype, copy=True)
        return device.place(out) if there else out

    def _copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        there = self._device.holds(target)
        if there == self._device.holds(source):
            return target.copy_(source)
        self._device.copied(source, there, non_blocking)
        with self._device.doing(moving=True):
            return target.copy_(source)

    def _deepcopy(self, tensor: torch.Tensor, memo: Any) -> Any:
        with self._device.doing(moving=True):
            out = tensor.__deepcopy__(memo)
        return self._device.place(out) if self._device.holds(tensor) else out

    def _tolist(self, tensor: torch.Tensor) -> Any:
        if self._device.holds(tensor):
            self._device.wait("tolist")
        return tensor.tolist()

    def _numpy(self, tensor: torch.Tensor, **options: Any) -> Any:
        if self._device.holds(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return tensor.numpy(**options)

    def _array(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return self._numpy(tensor).__array__(*args, **options)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Let the CPU compute what the device does by itself: no operation inside is a launch."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


class _Event:
    """An event: waiting for it costs nothing once the host has waited for what came after it."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._recorded_at: int | None = None

    def record(self, _stream: object = None) -> None:
        self._recorded_at = self._device.waits

    def synchronize(self) -> None:
        if self._recorded_at == self._device.waits:
            self._device.wait("event")


class _Stream:
    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def wait_stream(self, _other: _Stream) -> None:
        """Streams run in order here."""

    def synchronize(self) -> None:
        self._device.wait("stream")


class _Graph:
    """The operations of a capture; a replay reads and writes the same memory again."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.operations: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        self._device.counts.replays += 1
        with _unwatched():
            for func, args, kwargs, out in self.operations:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors_of(out), _tensors_of(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def _capture(device: EmulatedDevice, graph: _Graph) -> Iterator[None]:
    device.captured = []
    try:
        yield
        graph.operations = device.captured
    finally:
        device.captured = None


class _Kernels:
    """In place of the modules of Triton kernels: the same in torch's functions, with the launches of Triton's."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def run_race(self, *tensors: torch.Tensor) -> None:
        self._launch(race_in_parts, 1, tensors)

    def place(self, *arguments: Any) -> None:
        self._launch(place_in_torch, 1, arguments)

    def attend(self, queries: torch.Tensor, cache: torch.Tensor, inputs: StepInputs, *more: Any) -> None:
        launches = 2 * bool(len(inputs.items)) + bool(len(inputs.whole_items))
        self._launch(attend_in_torch, launches, (queries, cache, inputs, *more))

    def _launch(self, kernel: Callable[..., None], launches: int, arguments: Sequence[Any]) -> None:
        if not all(map(self._device.holds, _tensors_of(arguments))):
            raise DeviceMismatch("a kernel got tensors of the host")
        self._device.counts.launches[kernel.__name__] += launches
        if self._device.captured is not None:
            self._device.captured.append((kernel, arguments, {}, None))
        with _unwatched():
            kernel(*arguments)


def race_in_parts(
    logits: torch.Tensor, states: torch.Tensor, temperature: torch.Tensor, least: torch.Tensor, winners: torch.Tensor
) -> None:
    """Compute in torch's functions what the Triton kernel of the coupled draw computes."""
    vocab, parts = logits.shape[1], least.shape[1]
    size = math.ceil(math.ceil(vocab / parts) / 1024) * 1024
    for part in range(parts):
        ids = torch.arange(min(part * size, vocab), min((part + 1) * size, vocab))
        if not len(ids):
            least[:, part], winners[:, part] = float("inf"), 0
            continue
        of_part = logits[:, ids].to(torch.float64)
        times = noise.exponentials(states[:, None], ids).log() - of_part / temperature[:, None]
        times = torch.where(of_part > float("-inf"), times, float("inf"))
        best = times.min(dim=1)
        least[:, part] = best.values
        winners[:, part] = torch.where(best.values < float("inf"), ids[best.indices], 0)


def place_in_torch(
    qkv: torch.Tensor,
    queries: torch.Tensor,
    cache: torch.Tensor,
    inputs: StepInputs,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    rotated: int,
) -> None:
    """Compute in torch's functions what the Triton kernel before attention computes."""
    tokens, heads, dim = queries.shape
    rotating = heads + len(cache) // 2
    if rotation is not None:
        swap = torch.cat([torch.arange(rotated).roll(rotated // 2), torch.arange(rotated, dim)])
        cosines, sines = (each[inputs.positions[:tokens]][:, None].float() for each in rotation)
        part = qkv[:, :rotating].float()
        qkv[:, :rotating] = part * cosines + part[:, :, swap] * sines
    queries.copy_(qkv[:, :heads])
    new = qkv[:, heads:].nan_to_num() if cache.dtype == torch.float16 else qkv[:, heads:]
    cache[:, inputs.slots[:tokens]] = new.transpose(0, 1)


def attend_in_torch(
    queries: torch.Tensor,
    cache: torch.Tensor,
    inputs: StepInputs,
    out: torch.Tensor,
    scale: float,
    cap: float,
    window: int | None,
    flags: torch.Tensor | None,
    reached: torch.Tensor,
) -> None:
    """Compute in torch's functions what the Triton kernels of attention compute, item by item."""
    kv_heads, dim = len(cache) // 2, queries.shape[2]
    positions, links, pages = inputs.positions, inputs.links, inputs.pages
    for whole, items in ((False, inputs.items), (True, inputs.whole_items)):
        for lane, low, high, place in items[: int(inputs.num_items[int(whole)])].tolist():
            token, first, live, base, count, page, link, _ = inputs.lanes[lane].tolist()
            index = torch.arange(low, high)
            slots = pages[page + index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
            new, own = index - base, first + torch.arange(live)[:, None]
            linked = new <= own
            if link >= 0:
                linked = links[link + own * count + new.clamp(min=0)].bool()
            visible = (new < 0) | linked
            if window is not None:
                at = torch.where(new < 0, index, positions[token - first + new.clamp(min=0)])
                visible &= at > positions[token : token + live, None] - window
            keys, values = cache[:, slots].float().view(2, kv_heads, 1, len(index), dim)
            query = queries[token : token + live].float().view(live, kv_heads, -1, dim).permute(1, 2, 0, 3)
            scores = query @ keys.transpose(2, 3) * scale
            scores = torch.tanh(scores / cap) * cap if cap else scores
            scores = scores.masked_fill(~visible, -1e30)  # [kv heads, group, tokens, keys]
            top = scores.amax(dim=3)
            weights = torch.exp(scores - top[..., None]).masked_fill(~visible, 0)
            hit = (visible & flags[slots].bool()).any(dim=1) if flags is not None else torch.zeros(live)
            total, sums = weights.sum(dim=3), weights.to(cache.dtype).float() @ values
            total, top, sums = (
                each.flatten(0, 1).transpose(0, 1) for each in (total, top, sums)
            )  # [tokens, heads, ...]
            if whole:
                out[token : token + live] = sums / total[..., None]
                if flags is not None:
                    reached[token : token + live] = hit.to(reached.dtype)
            else:
                inputs.parts[place : place + live] = sums
                inputs.stats[place : place + live] = torch.stack((top, total, hit[:, None].expand_as(top)), dim=2)
    for token, (begin, step, num) in enumerate(inputs.joins[: len(out)].tolist()):
        if num:
            of = begin + torch.arange(num) * step
            tops, totals, hits = inputs.stats[of].unbind(dim=2)  # [ranges, heads] each
            weights = torch.exp(tops - tops.amax(dim=0))
            joined = (weights[..., None] * inputs.parts[of]).sum(dim=0)
            out[token] = joined / (weights * totals).sum(dim=0)[:, None]
            if flags is not None:
                reached[token] = int(hits.max())


class KernelsInTorch:
    """In place of the module of Triton kernels on a CPU without them."""

    place = staticmethod(place_in_torch)
    attend = staticmethod(attend_in_torch)


@contextlib.contextmanager
def emulated_cuda() -> Iterator[EmulatedDevice]:
    """Emulate a CUDA device for everything inside."""
    device = EmulatedDevice()
    stream = _Stream(device)
    autocast = torch.autocast
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "emulated",
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": lambda *_: (device.free_bytes, 24 << 30),
        "synchronize": lambda *_: device.wait("device"),
        "Stream": lambda *_: stream,
        "Event": lambda **_: _Event(device),
        "CUDAGraph": lambda: _Graph(device),
        "graph": lambda graph, *_, **__: _capture(device, graph),
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: device.captured is not None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "autocast", lambda kind, *args, **more: autocast("cpu", *args, **more))
        for module in (triton_race, decoder):
            patch.setattr(module, "_kernels", lambda: _Kernels(device))
        with _Operations(device), _Functions(device):
            yield device
