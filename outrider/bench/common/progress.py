"""Progress of a benchmark in the terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_S = 30.0  # between lines of progress where there is no bar


@contextlib.contextmanager
def progress_spinner(console: Console) -> Iterator[Callable[[str], None]]:
    """Show a spinner with the elapsed time. Yield a function that sets its text."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)


class TurnProgress:
    """Progress on stderr: a bar in a terminal, one line per stage and per half minute elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._last_text = ""
        self._last_line = time.monotonic()

    def set_text(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if self._progress.disable and text != self._last_text:
            self.print(text)
        self._last_text = text

    def show(self, text: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=text, completed=done, total=total)
        if self._progress.disable and time.monotonic() - self._last_line > _LINE_S:
            self._last_line = time.monotonic()
            self.print(f"{done} of {total} answers, now {text}")

    def print(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        self._progress.console.print(line, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def turn_progress() -> Iterator[TurnProgress]:
    text, bar, *_ = Progress.get_default_columns()
    columns = (text, bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield TurnProgress(progress)
