"""The tree of errors, and the one table that maps them to gRPC and HTTP statuses.

Raised everywhere, turned into a status in one place per protocol
(`error_interceptor` for gRPC) and back into an exception in one
place (`error_from_rpc`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from outrider.protocol.printable import printable

MAX_SHOWN = 200  # characters of a value
MAX_MESSAGE_BYTES = 1_500  # with everything else of an error it must fit into a header of gRPC
_MAX_PART_BYTES = 800


class OutriderError(Exception):
    """Anything that Outrider itself reports. `code` is stable, the message is for people."""

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: Any = "",
        limit: Any = "",
        retry_after_ms: int | None = None,
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
    """The caller sent something that can never work."""

    code = "invalid_request"

    @classmethod
    def of(cls, field: str, value: Any, limit: str) -> InvalidRequest:
        """The usual form: which field, what it was, what it may be."""
        return cls(f"{field} is {shorten(str(value))}, must be {limit}", field=field, value=value, limit=limit)


class Unauthenticated(OutriderError):
    """The caller showed no key, or none that opens this door."""

    code = "unauthenticated"


class NotFound(OutriderError):
    """What was named does not exist (any more)."""

    code = "not_found"


class Overloaded(OutriderError):
    """No room now; the same request may work later."""

    code = "overloaded"


class Unavailable(OutriderError):
    """Nobody is there to do the work yet, or this server is leaving."""

    code = "unavailable"


class PeerLost(OutriderError):
    """The other end of a stream went away in the middle."""

    code = "peer_lost"


class ProtocolViolation(PeerLost):
    """The other end sent what no honest peer sends: it is as good as gone, and is to be left alone for a while.

    Raised about a peer, never sent to one: on the wire it is a lost peer.
    """


class Fenced(OutriderError):
    """Somebody with a higher epoch owns this session now."""

    code = "fenced"


class Conflict(OutriderError):
    """The request contradicts the state it refers to."""

    code = "conflict"


class Expired(OutriderError):
    """A deadline passed."""

    code = "expired"


class ModelMismatch(OutriderError):
    """Two models that were to work together cannot."""

    code = "model_mismatch"


class StartupError(OutriderError):
    """A service cannot start: port, model path, configuration."""

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

# One row per kind: name of the gRPC status, HTTP status.
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
    """A kind that has none of its own has its parent's."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def _bounded(text: str, most: int) -> str:
    """What can be sent and shown: no lone surrogates, no control characters, so many bytes of UTF-8 at most."""
    data = printable(text).encode()
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def shorten(text: str) -> str:
    """Values come from strangers: never echo megabytes."""
    if len(text) <= MAX_SHOWN:
        return text
    size = f"… ({len(text)} characters)"
    return text[: MAX_SHOWN - len(size)] + size
