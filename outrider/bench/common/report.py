"""Report of a benchmark: required packages, description of the machine, statistics of times, and the JSON file."""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.base.config import check_installed
from outrider.protocol.errors import InvalidRequest

Row = dict[str, Any]
ENGINES = ("auto", "native", "cuda", "transformers", "vllm", "mock")


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of repeated runs of one step."""

    ms: Sequence[float]

    @property
    def best(self) -> float:
        return min(self.ms)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def p99(self) -> float:
        return sorted(self.ms)[math.ceil(0.99 * len(self.ms)) - 1]

    def row(self) -> Row:
        return {"rounds": len(self.ms), "min_ms": self.best, "median_ms": self.median}


def median(values: Iterable[float]) -> float | None:
    """Return the median; None without values."""
    present = list(values)
    return statistics.median(present) if present else None


def ratio(part: float, whole: float | None) -> float | None:
    """Return the ratio; None without a whole."""
    return part / whole if whole else None


def write_json(file: Path, rows: list[Row], summary: dict[str, Any], **where: Any) -> None:
    """Write the report; `where` adds fields to the description of the machine."""
    machine = {"cpus": os.cpu_count(), "processor": _processor(), "python": platform.python_version()} | where
    command = re.sub(r"(--api-key[ =])\S+", r"\1***", " ".join(sys.argv))  # reports are passed on
    report = {"machine": machine, "command": command, "rows": rows, "summary": summary}
    file.write_text(json.dumps(report, indent=2))


def check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Reject output files that cannot be written, before minutes of measuring."""
    for flag, file in (("--json", json_file), ("--plot", plot_file)):
        if file is not None:
            place = file if file.exists() else file.absolute().parent
            if file.is_dir() or not os.access(place, os.W_OK):
                raise InvalidRequest.of(flag, file, "a file that can be written, in a folder that exists")
    if plot_file is not None:
        if plot_file.suffix != ".png":
            raise InvalidRequest.of("--plot", plot_file, "a .png file")
        check_installed("matplotlib", "bench")


def check_engine(engine: str, engines: tuple[str, ...] = ENGINES) -> None:
    """Raise InvalidRequest for an unknown --engine."""
    if engine not in engines:
        raise InvalidRequest.of("--engine", engine, f"one of {', '.join(engines)}")


def import_on_use(package: str, extra: str, module: str) -> Any:
    """Import a module on use, so that other commands start without its dependencies."""
    check_installed(package, extra)
    return importlib.import_module(module)


def _processor() -> str:
    """Return the architecture, and on Linux the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {models[0]}" if models else platform.machine()
