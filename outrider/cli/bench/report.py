"""What benchmarks share: where they ran, how their times are summed up, and the file they write."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds that one thing took, time after time."""

    ms: Sequence[float]

    @property
    def least(self) -> float:
        return min(self.ms)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def p99(self) -> float:
        return sorted(self.ms)[math.ceil(0.99 * len(self.ms)) - 1]

    def row(self) -> Row:
        return {"rounds": len(self.ms), "min_ms": self.least, "median_ms": self.median}


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    return {"cpus": os.cpu_count(), "processor": _processor(), "python": platform.python_version()}


def write_json(file: Path, rows: list[Row], summary: dict[str, Any], **where: Any) -> None:
    """`where` says more of the machine."""
    report = {"machine": machine() | where, "command": " ".join(sys.argv), "rows": rows, "summary": summary}
    file.write_text(json.dumps(report, indent=2))


def _processor() -> str:
    """Its architecture, and its model where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {models[0]}" if models else platform.machine()
