"""Log limits: repeated lines are counted instead of written, and long values are cut."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

import structlog
from structlog.typing import EventDict, WrappedLogger

WINDOW_S = 10.0
MOST = 1_000  # lines of the same event in a window
MOST_WARNINGS = 20  # of warnings and errors: these have tracebacks
_QUIET = frozenset({"debug", "info"})
_NAMED = 80  # characters that identify an event
_NUMBERS = re.compile("[0-9]+")
_KNOWN = 1_000
_CHARACTERS = 4_000  # of a value; long enough for a traceback


class RepeatLimiter:
    """Limit of equal log lines per window. The first line of the next window reports how many were left out."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # when the window began, lines since then

    def missing(self, level: str, event: str) -> int | None:
        """Return how many lines were left out before this one; None: leave this one out too."""
        key, now = (level, _NUMBERS.sub("0", event.partition("\n")[0][:_NAMED])), self._now()
        most = MOST if level in _QUIET else MOST_WARNINGS
        began, lines = self._seen.get(key, (now, 0))
        left_out = 0
        if now - began >= WINDOW_S:
            began, lines, left_out = now, 0, max(0, lines - most)
        if len(self._seen) >= _KNOWN and key not in self._seen:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = (began, lines + 1)
        return left_out if lines < most else None

    def process(self, _logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Process an event of structlog."""
        missing = self.missing(method, str(event.get("event")))
        if missing is None:
            raise structlog.DropEvent
        if missing:
            event["left_out"] = missing
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """Filter a record of the standard library."""
        message = record.getMessage()
        missing = self.missing(record.levelname.lower(), f"{record.name}: {message}")
        if missing:
            record.msg, record.args = f"{message} ({missing} such lines left out before)", ()
        return missing is not None


def cut_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Cut long values of an event."""
    for name, value in event.items():
        if isinstance(value, str) and len(value) > _CHARACTERS:
            event[name] = f"{value[:_CHARACTERS]}… ({len(value)} characters)"
    return event
