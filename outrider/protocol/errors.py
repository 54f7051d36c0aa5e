"""Exception tree, with the gRPC and HTTP status of each kind.

One place per protocol turns an exception into a status (`error_interceptor` for
gRPC), and one place turns a status back into an exception (`error_from_rpc`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from outrider.protocol.printable import printable

MAX_SHOWN = 200  # characters of a value
MAX_MESSAGE_BYTES = 1_500  # the whole error must fit into a gRPC header
_MAX_PART_BYTES = 800


class OutriderError(Exception):
    """Base class of Outrider's errors. `code` is stable, the message is for people."""

    code: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init_subclass__(cls, code: str = "", grpc: str = "", http: int = 0) -> None:
        if code:
            cls.code, cls.grpc_status, cls.http_status = code, grpc, http

    def __init__(
        self, message: str, *, field: str = "", value: Any = "", limit: Any = "", retry_after_ms: int | None = None
    ) -> None:
        given = str(value)
        shown = shorten(printable(shorten(given)))
        if shown != given:
            for whole in (given, repr(given)[1:-1]):
                message = message.replace(whole, shown)
        self.message = _bounded(message, MAX_MESSAGE_BYTES)
        super().__init__(self.message)
        self.field = _bounded(shorten(printable(shorten(field))), _MAX_PART_BYTES)
        self.value = _bounded(shown, _MAX_PART_BYTES)
        self.limit = _bounded(str(limit), _MAX_PART_BYTES)
        self.retry_after_ms = retry_after_ms

    @classmethod
    def of(cls, field: str, value: Any, limit: Any, why: str = "") -> Self:
        """Return the usual error: it names the field, its value and the limit."""
        return cls(f"{field} is {shorten(str(value))}, must be {limit}{why}", field=field, value=value, limit=limit)


class InvalidRequest(OutriderError, code="invalid_request", grpc="INVALID_ARGUMENT", http=400):
    """Error for a request that can never succeed."""


class ContextExceeded(InvalidRequest, code="context_length_exceeded", grpc="INVALID_ARGUMENT", http=400):
    """Error for a request without room in the context, by the code and in the words that agents know."""


class Unauthenticated(OutriderError, code="unauthenticated", grpc="UNAUTHENTICATED", http=401):
    """Error for a call without an accepted API key."""


class NotFound(OutriderError, code="not_found", grpc="NOT_FOUND", http=404):
    """Error for something that does not exist, or no longer does."""


class Overloaded(OutriderError, code="overloaded", grpc="RESOURCE_EXHAUSTED", http=429):
    """Error for missing capacity; the same request may succeed later."""


class Unavailable(OutriderError, code="unavailable", grpc="UNAVAILABLE", http=503):
    """Error for a service without workers yet, or one that is shutting down."""


class PeerLost(OutriderError, code="peer_lost", grpc="UNAVAILABLE", http=502):
    """Error for a stream whose peer disconnected before the end."""


class ProtocolViolation(PeerLost):
    """Error for a peer that broke the protocol and is avoided for a while; on the wire it is a PeerLost."""


class Fenced(OutriderError, code="fenced", grpc="ABORTED", http=409):
    """Error for a session that another coordinator took over with a higher epoch."""


class Conflict(OutriderError, code="conflict", grpc="FAILED_PRECONDITION", http=409):
    """Error for a request that contradicts the state it refers to."""


class Cancelled(OutriderError, code="cancelled", grpc="CANCELLED", http=499):
    """Error for an answer that another call has cancelled."""


class Expired(OutriderError, code="expired", grpc="DEADLINE_EXCEEDED", http=504):
    """Error for a passed deadline."""


class ModelMismatch(OutriderError, code="model_mismatch", grpc="FAILED_PRECONDITION", http=409):
    """Error for two models that cannot work together."""


class StartupError(OutriderError, code="startup", grpc="INTERNAL", http=500):
    """Error for a service that cannot start: port, model path, configuration."""


_LEAVES: tuple[type[OutriderError], ...] = (OutriderError, *OutriderError.__subclasses__(), ContextExceeded)
KINDS = {kind.code: kind for kind in _LEAVES}  # by code


def _bounded(text: str, most: int) -> str:
    """Return a text that can be sent and shown: no lone surrogates or control characters, at most `most` bytes."""
    data = printable(text).encode()
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def shorten(text: str) -> str:
    """Return at most MAX_SHOWN characters; values come from callers and may be megabytes."""
    if len(text) <= MAX_SHOWN:
        return text
    size = f"… ({len(text)} characters)"
    return text[: MAX_SHOWN - len(size)] + size
