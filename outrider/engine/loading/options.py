"""Options of an engine, and the device and number format that they select."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from outrider.base.config import KV_TOKENS, WorkerSettings
from outrider.protocol.errors import StartupError

_NO_GPU = ("no NVIDIA driver", "No CUDA GPUs", "might not have a CUDA gpu")  # in torch's messages
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine. `engine` must run: native, cuda or transformers; auto selects the fastest that works."""

    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    engine: str = "auto"
    threads: int = 0
    kv_dtype: str = "auto"  # of engine native
    kv_tokens: int | None = KV_TOKENS  # None: what fits into most of a GPU's free memory
    prefix_tokens: int | None = None  # capacity for evictable cached blocks; None: by device
    head_ids: tuple[int, ...] | None = None  # the only ids that get logits, in this order; None: all
    layers: int | None = None  # load the first layers only
    pace: str = ""  # least time of a step, see throttled.py
    blur: str = ""  # noise on the logits of a throttled engine

    @classmethod
    def of(cls, settings: WorkerSettings) -> EngineOptions:
        """Return the options in a worker's settings."""
        shared = settings.model_dump(include={field.name for field in fields(cls)} & WorkerSettings.model_fields.keys())
        by_device = {"prefix_tokens": None} if settings.prefix_tokens < 0 else {}
        return cls(**shared | {"kv_tokens": settings.kv_tokens or None} | by_device)


def pick_device(device: str, engine: str = "auto") -> torch.device:
    """Return the device to run on; `engine` decides where `device` is auto. Raises StartupError if it is missing."""
    if device == "auto":
        if engine == "native":
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        if engine == "cuda":
            raise StartupError("engine cuda needs a CUDA device", field="engine", value=engine, limit="auto or native")
        if fault := gpu_fault():
            raise StartupError(f"torch cannot use the GPU: {fault}", field="device", value=device, limit="cpu")
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise StartupError(f"no device {device!r}", field="device", value=device, limit="auto, cpu, cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("no CUDA device is usable here", field="device", value=device, limit="auto or cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise StartupError.of("device", device, f"one of the {count} here, cuda:0 to cuda:{count - 1}")
    return chosen


def gpu_fault() -> str:
    """Return why torch cannot use a GPU that this machine has, such as an old driver; nothing where there is none."""
    if torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return "" if any(sign in str(error) for sign in _NO_GPU) else str(error).partition("\n")[0]
    return ""


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the number format. auto: float32 on a CPU, where it is exact; bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise StartupError(f"unknown dtype {dtype!r}", field="dtype", value=dtype, limit=", ".join(["auto", *DTYPES]))
    return DTYPES[dtype]
