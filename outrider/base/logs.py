"""Logs of a service on standard error, text or JSON; progress of its start on standard output.

Logs and warnings of libraries take the same path, so that with JSON every line is an object: timestamp, level, event
and service, and for a request its request_id and session_id (bound by `request_context` and the session's opener).
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from outrider.base.log_limits import RepeatLimiter, cut_values
from outrider.protocol.printable import printable


class LossyStream(io.TextIOBase):
    """Stream that drops lines it cannot write (full disk, closed pipe) and reports their number later."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = 0

    def write(self, text: str) -> int:
        reported = f"{self._lost} log lines lost: they could not be written\n{text}" if self._lost else text
        try:
            self._stream.write(reported)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._lost += 1
        else:
            self._lost = 0
        return len(text)


def set_up_logs(level: str, *, as_json: bool, service: str) -> None:
    number = getattr(logging, level.upper())
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        cut_values,
    ]
    repeats = RepeatLimiter()
    stream = LossyStream(sys.stderr)
    renderer: Processor = _text()
    if as_json:
        processors.append(lambda _logger, _method, event: {**event, "service": service})
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[repeats.process, *processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, stream)),
        cache_logger_on_first_use=True,
    )
    _redirect_libraries(stream, max(number, logging.WARNING), processors, renderer, repeats)


def _text() -> Processor:
    write = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)

    def render(logger: WrappedLogger, method: str, event: EventDict) -> str:
        for name, value in event.items():
            if isinstance(value, str):
                event[name] = printable(value)
        return str(write(logger, method, event))

    return render


def _redirect_libraries(
    stream: LossyStream, level: int, processors: list[Processor], renderer: Processor, repeats: RepeatLimiter
) -> None:
    handler = logging.StreamHandler(stream)
    handler.addFilter(_without_peer_traceback)
    handler.addFilter(repeats.filter)
    foreign = [structlog.stdlib.add_logger_name, *processors]
    own = [ProcessorFormatter.remove_processors_meta, renderer]
    handler.setFormatter(ProcessorFormatter(foreign_pre_chain=foreign, processors=own))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()  # some libraries install their own, with another format
            logger.propagate = True


def _without_peer_traceback(record: logging.LogRecord) -> bool:
    """Shorten gRPC's report of metadata that is not UTF-8: the peer is at fault, a traceback would not help."""
    if record.name.startswith("grpc.") and str(record.msg).startswith("Invalid encoding"):
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def report_progress(text: str) -> None:
    """Print a stage of the start on standard output; `outrider up` shows it next to the service's name."""
    with contextlib.suppress(OSError, UnicodeError):  # a closed pipe or a locale must not end the process
        print(f"progress: {text}", flush=True)
