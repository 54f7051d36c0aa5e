"""Request context: a call's request id and trace, read at every edge and sent on to the next service.

Both are gRPC metadata or HTTP headers. Log lines of the call's task, and of tasks it starts, have the request id.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from structlog.contextvars import bind_contextvars

from outrider.observability.tracing import CARRIED, TRACE_ID, Span
from outrider.protocol.checks import MAX_ID_CHARACTERS

REQUEST_ID = "x-request-id"
_CARRIED = re.compile(r"[\x20-\x7e]{1,512}")
_SOUND = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}")  # no characters that could forge a log line


@dataclass(frozen=True, slots=True)
class RequestContext:
    request_id: str = ""
    carrier: Mapping[str, str] = field(default_factory=dict)  # of its trace

    def metadata(self, span: Span) -> tuple[tuple[str, str], ...]:
        """Return the metadata for the next service's call, `span`. A trace continues even if this service has none."""
        named = ((REQUEST_ID, self.request_id),) if self.request_id else ()
        return (*named, *(span.carrier() or self.carrier).items())


_CURRENT: ContextVar[RequestContext] = ContextVar("request_context")


def bind_context(metadata: Iterable[tuple[str, str | bytes]], *, first: bool = False) -> RequestContext:
    """Read and bind a call's context once, in its own task; with `first`, a request without an id gets one."""
    given = {key: value for key, value in metadata if isinstance(value, str)}
    request_id = given.get(REQUEST_ID, "")
    if not _SOUND.fullmatch(request_id):
        request_id = secrets.token_hex(16) if first else ""
    context = RequestContext(request_id, {key: given[key] for key in CARRIED if _CARRIED.fullmatch(given.get(key, ""))})
    _CURRENT.set(context)
    TRACE_ID.set(secrets.randbits(128) if first else 0)
    if request_id:
        bind_contextvars(request_id=request_id)
    return context


def current() -> RequestContext:
    """Return the context of this task's call."""
    return _CURRENT.get(RequestContext())
