"""Where a call comes from: the id of the request and its trace, taken up at every edge and sent on to the next hop.

The same two travel over gRPC as metadata and over HTTP as headers. Logs of
the task that took them up, and of those it starts, name the request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from structlog.contextvars import bind_contextvars

from outrider.observability.tracing import CARRIED, Span
from outrider.protocol.checks import MAX_ID_CHARACTERS

REQUEST_ID = "x-request-id"
_SOUND = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}")  # nothing that could forge a line of a log


@dataclass(frozen=True, slots=True)
class RequestContext:
    request_id: str = ""
    carrier: Mapping[str, str] = field(default_factory=dict)  # of its trace

    def metadata(self, span: Span) -> tuple[tuple[str, str], ...]:
        """What the next hop is told; `span` is what is asked of it. Untraced here, a trace goes on all the same."""
        named = ((REQUEST_ID, self.request_id),) if self.request_id else ()
        return (*named, *(span.carrier() or self.carrier).items())


_HERE: ContextVar[RequestContext] = ContextVar("origin")


def take_up(metadata: Iterable[tuple[str, str | bytes]], *, first: bool = False) -> RequestContext:
    """Once per call, in its own task. `first`: nobody before us may have named the request, so we do.

    Keys are lower case, as gRPC and HTTP servers give them.
    """
    given = {key: value for key, value in metadata if isinstance(value, str)}
    request_id = given.get(REQUEST_ID, "")
    if not _SOUND.fullmatch(request_id):
        request_id = secrets.token_hex(16) if first else ""
    origin = RequestContext(request_id, {key: given[key] for key in CARRIED if key in given})
    _HERE.set(origin)
    if request_id:
        bind_contextvars(request_id=request_id)
    return origin


def current() -> RequestContext:
    """Of the call that this task works for."""
    return _HERE.get(RequestContext())
