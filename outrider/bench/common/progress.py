"""Progress of a benchmark in the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_spinner(console: Console) -> Iterator[Callable[[str], None]]:
    """Show a spinner with the elapsed time. Yield a function that sets its text."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
