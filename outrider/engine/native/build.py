"""Compilation of the kernels, once per machine and source, and loading of the result.

`python -m outrider.engine.native.build DIRECTORY` compiles them ahead, for machines without a compiler (containers).
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from outrider.base.config import home

_FOLDER = Path(__file__).parent
_AHEAD = _FOLDER / "built"
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
# Instruction sets that are compiled ahead, best first, with torch's name of the capability that each needs.
_LEVELS = {"x86_64": {"x86-64-v4": "avx512_bw", "x86-64-v3": "avx2"}, "aarch64": {"armv8-a": ""}}


class NoCompiler(Exception):
    """The kernels can be neither compiled nor loaded on this machine."""


def library() -> ctypes.CDLL:
    """Return the kernels for this machine. Raises NoCompiler."""
    if isinstance(found := find_library(), str):
        raise NoCompiler(found)
    return found


@cache
def find_library() -> ctypes.CDLL | str:
    """Return the kernels for this machine, or why there are none. A compiler that failed is not run again."""
    try:
        return load(_built_ahead() or compile_for("native", home() / "kernels"))
    except (NoCompiler, OSError) as error:
        return f"the kernels cannot be kept or loaded: {error}" if isinstance(error, OSError) else str(error)


def identity() -> str:
    """Return a digest of the compiled kernels, whether they use tiles, and the processor. Raises NoCompiler."""
    built = Path(library()._name).read_bytes()  # noqa: SLF001 - ctypes has no other place for the path
    return f"{hashlib.sha256(built).hexdigest()} {library().outrider_tiles()} {_processor()}"


def load(built: Path) -> ctypes.CDLL:
    """Load a compiled library and declare its functions."""
    found = ctypes.CDLL(str(built))
    found.outrider_packed_size.restype = found.outrider_scratch.restype = ctypes.c_int64
    found.outrider_cap.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float)
    return found


def structures() -> SimpleNamespace:
    """Return the kernels' structures, as their header declares them."""
    found: dict[str, Any] = {"int32_t": ctypes.c_int32, "long": ctypes.c_long, "float": ctypes.c_float}
    header = (_FOLDER / "model.h").read_text()
    for body, name in re.findall(r"^typedef struct \{\n(.*?)^\} (\w+);", header, re.MULTILINE | re.DOTALL):
        fields = []
        for kind, declared in re.findall(r"^    (?:const )?(\w+) ([^;]+);", body, re.MULTILINE):
            for pointer, field, count in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", declared):
                one = ctypes.c_void_p if pointer else found[kind]
                fields.append((field, one * int(count) if count else one))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return SimpleNamespace(**found)


def compile_for(march: str, into: Path, *flags: str) -> Path:
    """Compile the kernels for an instruction set, unless that was done before."""
    target = into / f"kernels-{march}-{_digest(march, *flags)}.so"
    if target.exists():
        return target
    if (compiler := shutil.which("cc")) is None:
        raise NoCompiler("there is no C compiler (cc) on this machine")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        sources = sorted(_FOLDER.glob("*.c"))
        # Linked without OpenMP: torch has loaded its library already, and two thread pools would compete.
        side_by_side = [[compiler, *_FLAGS, *flags, f"-march={march}", "-c", str(source)] for source in sources]
        link = [compiler, "-shared", *(f"{source.stem}.o" for source in sources), "-o", "kernels.so", "-lm"]
        for commands in (side_by_side, [link]):
            running = [subprocess.Popen(each, cwd=scratch, stderr=subprocess.PIPE, text=True) for each in commands]
            errors = [" ".join(process.communicate()[1].split()) for process in running]
            if failed := [error for process, error in zip(running, errors, strict=True) if process.returncode]:
                raise NoCompiler(f"{compiler} failed: {failed[0][:500]}")
        Path(scratch, "kernels.so").rename(target)  # atomic: several processes may compile at once
    return target


def levels() -> dict[str, str]:
    """Return the instruction sets of this processor family that are compiled ahead."""
    return _LEVELS.get(platform.machine(), {})


def _built_ahead() -> Path | None:
    for level, needed in levels().items():
        built = _AHEAD / f"kernels-{level}-{_digest(level)}.so"
        if built.exists() and (not needed or torch.cpu.get_capabilities().get(needed)):
            return built
    return None


def _digest(march: str, *flags: str) -> str:
    """Return a digest of everything that decides the compiled result."""
    digest = hashlib.sha256(" ".join([*_FLAGS, *flags]).encode())
    for source in sorted(_FOLDER.glob("*.[ch]")):
        digest.update(source.read_bytes())
    if march == "native":
        digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def main() -> None:
    """Compile for every level of this processor family, into the package or a directory."""
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else _AHEAD
    for level in levels() or ("native",):
        compile_for(level, into)


if __name__ == "__main__":
    main()
