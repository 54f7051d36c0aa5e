"""Span and log lines of one worker stream, written when it ends."""

from __future__ import annotations

from typing import Self

import structlog
from structlog.contextvars import bind_contextvars

from outrider.observability.request_context import RequestContext
from outrider.observability.tracing import Tracing
from outrider.protocol.errors import OutriderError

log = structlog.get_logger(__name__)


class StreamSpan:
    """Span of one session's stream. It adds the session id to the log lines of its task."""

    def __init__(self, tracing: Tracing, name: str, context: RequestContext, session_id: str) -> None:
        bind_contextvars(session_id=session_id)
        identity = {"outrider.session_id": session_id, "outrider.request_id": context.request_id}
        self._span = tracing.start(name, context.carrier, identity)
        self._name = name
        self._steps = self._tokens = self._step_us = self._cached_tokens = 0

    def add(self, tokens: int, step_us: int, cached_tokens: int = 0, steps: int = 1) -> None:
        if tokens and not self._tokens:
            self._span.event("first token")
        self._steps += steps
        self._tokens += tokens
        self._step_us += steps * step_us
        self._cached_tokens += cached_tokens

    def __enter__(self) -> Self:
        log.debug("session opened", hop=self._name)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        mean_step_ms = self._step_us / 1000 / max(1, self._steps)
        failure = {"error": error.message} if isinstance(error, OutriderError) else {}
        counts = {"steps": self._steps, "tokens": self._tokens, "cached_tokens": self._cached_tokens}
        self._span.set({f"outrider.{name}": value for name, value in (counts | {"mean_step_ms": mean_step_ms}).items()})
        self._span.end(error)
        log.debug("session ended", hop=self._name, **counts, mean_step_ms=round(mean_step_ms, 3), **failure)
