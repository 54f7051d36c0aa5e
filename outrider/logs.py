"""Logs of a service on standard error, text or JSON; progress of its start on standard output."""

from __future__ import annotations

import logging
import sys

import structlog


def set_up_logs(level: str, *, as_json: bool) -> None:
    number = getattr(logging, level.upper())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)


def report_progress(text: str) -> None:
    """One line on standard output per stage of starting; `outrider up` shows it beside the service's name."""
    print(f"progress: {text}", flush=True)
