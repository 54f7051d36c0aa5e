"""The weights of a checkpoint: safetensors, sharded too, or plain tensors in `.bin` files.

Names and shapes are known before anything is allocated. A `.bin` file is a zip of a pickle and raw numbers. The pickle
may name nothing but tensors, and only torch's weights-only reader runs it.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from drafter.published.checkpoint_config import read_json, refused
from outrider.protocol.errors import StartupError

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_MAX_INDEX_BYTES = 64 << 20
_MAX_PICKLE_BYTES = 16 << 20
_MAX_TENSORS = 200_000
_NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _NUMBERS | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_STORAGES = ("BFloat16", "Bool", "Double", "Float", "Half", "Int", "Long")
_PLAIN_GLOBALS = {f"torch {kind}Storage" for kind in _STORAGES} | {
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
}


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor in a file that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def weight_entries(folder: Path) -> dict[str, WeightEntry]:
    """Return the tensors of a checkpoint by name. Raise StartupError for files that are not plain weights."""
    found: dict[str, WeightEntry] = {}
    for path in _files(folder):
        try:
            found |= _safetensors(folder, path) if path.suffix == ".safetensors" else _pickled(folder, path)
        except StartupError:
            raise
        except Exception as error:  # of damaged files, torch's reader may raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise refused(folder, f"has a damaged {path.name}: {reason}", "plain weights") from error
    return found


def read_finite(folder: Path, name: str, entry: WeightEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Read a tensor, in float32 at most unless `dtype` is given; refuse one with values that are not finite there."""
    weight = entry.read().to(dtype or (torch.float32 if entry.dtype is torch.float64 else entry.dtype))
    if not entry.dtype.is_floating_point or not bool(torch.isfinite(weight).all()):
        raise refused(folder, f"has NaN or infinite values in {name}, or no fractions", "finite weights")
    return weight


def _files(folder: Path) -> list[Path]:
    for single in _SINGLES:
        if (folder / single).is_file():
            return [folder / single]
        index = f"{single}.index.json"
        if (folder / index).is_file():
            return [_shard(folder, index, name) for name in sorted(_named_by(folder, index))]
    raise refused(folder, "holds no weights", " or ".join(_SINGLES))


def _named_by(folder: Path, index: str) -> set[str]:
    content = read_json(folder, index, _MAX_INDEX_BYTES)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise refused(folder, f"has no weight_map in its {index}")
    return set(shards.values())


def _shard(folder: Path, index: str, name: str) -> Path:
    if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
        raise refused(folder, f"names {name!r} in its {index}", "names of weight files in the same folder")
    return folder / name


def _safetensors(folder: Path, path: Path) -> dict[str, WeightEntry]:
    found = {}
    with safe_open(path, "pt") as weights:  # compares every claimed size with the size of the file
        for name in weights.keys():  # noqa: SIM118
            part = weights.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise refused(folder, f"has {name} as {part.get_dtype()}", f"one of {', '.join(_DTYPES)}")
            found[name] = WeightEntry(tuple(part.get_shape()), dtype, _Reader(path, name))
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """One tensor of a safetensors file; the file is open only while the tensor is read."""

    path: Path
    name: str

    def __call__(self) -> torch.Tensor:
        with safe_open(self.path, "pt") as weights:
            weight: torch.Tensor = weights.get_tensor(self.name)
            return weight


def _pickled(folder: Path, path: Path) -> dict[str, WeightEntry]:
    """Return the tensors of a `.bin` file, mapped from it: their numbers take no memory until they are used."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise refused(folder, f"has compressed parts in {path.name}", "stored parts")
        programs = [part for part in parts if part.filename.endswith("data.pkl")]
        if len(programs) != 1 or programs[0].file_size > _MAX_PICKLE_BYTES:  # torch would choose among several
            raise refused(folder, f"has not one list of tensors of at most {_MAX_PICKLE_BYTES} bytes in {path.name}")
        foreign = sorted(set(_globals(archive.read(programs[0]))) - _PLAIN_GLOBALS)
    if foreign:
        raise refused(
            folder, f"names {foreign[0].replace(' ', '.')} in {path.name}: not plain weights", "plain tensors"
        )
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return _checked(folder, path, tensors)


def _globals(program: bytes) -> Iterable[str]:
    """Yield what a pickle would import, without running it."""
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name == "GLOBAL":
            yield str(argument)
        elif opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            yield opcode.name


def _checked(folder: Path, path: Path, tensors: object) -> dict[str, WeightEntry]:
    if not isinstance(tensors, Mapping) or len(tensors) > _MAX_TENSORS:
        raise refused(folder, f"has no table of tensors in {path.name}")
    found = {}
    for name, weight in tensors.items():
        if not isinstance(name, str) or not isinstance(weight, torch.Tensor):
            raise refused(folder, f"has {name!r} in {path.name}, which is no tensor", "plain tensors")
        if weight.dtype not in _DTYPES.values():
            raise refused(folder, f"has {name} as {weight.dtype}", f"one of {', '.join(_DTYPES)}")
        if weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
            raise refused(folder, f"has {name} larger than its numbers in {path.name}", "contiguous tensors")
        found[name] = WeightEntry(tuple(weight.shape), weight.dtype, weight.detach)
    return found
