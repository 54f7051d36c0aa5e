"""`python -m tests.shape.profiled FILE MODULE ARGUMENTS…`: run a service and record which product functions run when.

SIGUSR1 begins the record, SIGUSR2 ends it and writes FILE. A coroutine or generator that is resumed counts as running
its function again.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.shape.sources import ROOT, product_files

# Up to Python 3.11 comprehensions are functions of their own.
_NO_FUNCTIONS = frozenset({"<module>", "<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"})

Runs = list[tuple[int, CodeType]]


def recorder(files: Collection[str], runs: Runs) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function that appends time and code whenever a function of `files` runs."""
    ours: dict[CodeType, bool] = {}
    clock = time.monotonic_ns  # one clock for all processes of a machine

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename in files and code.co_name not in _NO_FUNCTIONS
        if ours[code]:
            runs.append((clock(), code))

    return record


def write(into: Path, runs: Runs) -> None:
    """Write all at once: a file that is there is complete."""
    numbers: dict[str, int] = {}
    times = [(at, numbers.setdefault(_name(code), len(numbers))) for at, code in runs]
    part = into.with_suffix(".part")
    part.write_text(json.dumps({"functions": list(numbers), "runs": times}))
    part.replace(into)


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"


def main() -> None:
    into, module, *arguments = sys.argv[1:]
    runs: Runs = []
    record = recorder({str(path) for path in product_files()}, runs)

    def begin(*_: object) -> None:
        sys.setprofile(record)

    def end(*_: object) -> None:
        sys.setprofile(None)
        write(Path(into), list(runs))

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    # Only for threads that do not run yet: before Python 3.12 those that do cannot be reached.
    threading.setprofile(record)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
