"""Exception tree, and the table that maps it to gRPC and HTTP statuses.

One place per protocol turns an exception into a status (`error_interceptor` for
gRPC), and one place turns a status back into an exception (`error_from_rpc`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from outrider.protocol.printable import printable

MAX_SHOWN = 200  # characters of a value
MAX_MESSAGE_BYTES = 1_500  # the whole error must fit into a gRPC header
_MAX_PART_BYTES = 800


class OutriderError(Exception):
    """Base class of Outrider's errors. `code` is stable, the message is for people."""

    code: ClassVar[str] = "internal"

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


class InvalidRequest(OutriderError):
    """Error for a request that can never succeed."""

    code = "invalid_request"

    @classmethod
    def of(cls, field: str, value: Any, limit: str) -> InvalidRequest:
        """Return the usual error: it names the field, its value and the limit."""
        return cls(f"{field} is {shorten(str(value))}, must be {limit}", field=field, value=value, limit=limit)


class Unauthenticated(OutriderError):
    """Error for a call without an accepted API key."""

    code = "unauthenticated"


class NotFound(OutriderError):
    """Error for something that does not exist, or no longer does."""

    code = "not_found"


class Overloaded(OutriderError):
    """Error for missing capacity; the same request may succeed later."""

    code = "overloaded"


class Unavailable(OutriderError):
    """Error for a service without workers yet, or one that is shutting down."""

    code = "unavailable"


class PeerLost(OutriderError):
    """Error for a stream whose peer disconnected before the end."""

    code = "peer_lost"


class ProtocolViolation(PeerLost):
    """Error for a peer that broke the protocol; it counts as lost and is avoided for a while.

    It is raised about a peer and never sent to one: on the wire it is a PeerLost.
    """


class Fenced(OutriderError):
    """Error for a session that another coordinator took over with a higher epoch."""

    code = "fenced"


class Conflict(OutriderError):
    """Error for a request that contradicts the state it refers to."""

    code = "conflict"


class Expired(OutriderError):
    """Error for a passed deadline."""

    code = "expired"


class ModelMismatch(OutriderError):
    """Error for two models that cannot work together."""

    code = "model_mismatch"


class StartupError(OutriderError):
    """Error for a service that cannot start: port, model path, configuration."""

    code = "startup"


KINDS: dict[str, type[OutriderError]] = {
    kind.code: kind
    for kind in (
        OutriderError,
        InvalidRequest,
        Unauthenticated,
        NotFound,
        Overloaded,
        Unavailable,
        PeerLost,
        Fenced,
        Conflict,
        Expired,
        ModelMismatch,
        StartupError,
    )
}

# The gRPC status's name and the HTTP status of each kind.
STATUS: dict[type[OutriderError], tuple[str, int]] = {
    OutriderError: ("INTERNAL", 500),
    InvalidRequest: ("INVALID_ARGUMENT", 400),
    Unauthenticated: ("UNAUTHENTICATED", 401),
    NotFound: ("NOT_FOUND", 404),
    Overloaded: ("RESOURCE_EXHAUSTED", 429),
    Unavailable: ("UNAVAILABLE", 503),
    PeerLost: ("UNAVAILABLE", 502),
    Fenced: ("ABORTED", 409),
    Conflict: ("FAILED_PRECONDITION", 409),
    Expired: ("DEADLINE_EXCEEDED", 504),
    ModelMismatch: ("FAILED_PRECONDITION", 409),
    StartupError: ("INTERNAL", 500),
}


def http_status(error: OutriderError) -> int:
    return _statuses(error)[1]


def grpc_status_name(error: OutriderError) -> str:
    return _statuses(error)[0]


def _statuses(error: OutriderError) -> tuple[str, int]:
    """Return the statuses of an error; a kind without an entry has its parent's."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


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
