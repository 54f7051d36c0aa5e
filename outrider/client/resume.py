"""Resumption of broken streams: position, endpoint and retry limit. The module has no I/O; both clients use it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from outrider.base.rpc_status import error_from_rpc
from outrider.client.events import Reply, Started, Tokens, checked_fields, reply_from_proto
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError, PeerLost, Unavailable
from outrider.v1 import coordinator_pb2 as pb

RESUME_FOR_S = 30.0
RETRY_S = 0.2
_PAUSED = "write_timeout_s"  # named by the end of a stream that was not read for long, and can go on


class StreamProgress:
    """Received part of one output, and the request for the rest."""

    def __init__(self, request: pb.GenerateRequest | pb.ResumeRequest, endpoints: int) -> None:
        self._request = request
        self._rest = request if isinstance(request, pb.ResumeRequest) else pb.ResumeRequest()
        self._started = False
        self._endpoints, self._failures = endpoints, 0
        self._first_tries = 2 + endpoints  # until the first reply
        self._since = 0  # position at which the present stream started
        self._began = math.inf  # time at which it was accepted
        self._give_up: float | None = None
        self._until: float | None = None  # of all streams together

    def request(self) -> pb.GenerateRequest | pb.ResumeRequest:
        """Return the request of the next stream: the first, or one that resumes."""
        self._since, self._began = self._rest.from_position, math.inf
        return self._rest if self._rest.session_id else self._request

    def call(self, stub: Any, timeout_s: float | None) -> Any:
        """Start the next stream, with the synchronous or the asynchronous stub."""
        if timeout_s is not None:
            self._until = self._until or time.monotonic() + timeout_s
            timeout_s = max(0.0, min(1e9, self._until - time.monotonic()))  # a much longer one overflows in gRPC
        request = self.request()
        return (stub.Resume if isinstance(request, pb.ResumeRequest) else stub.Generate)(request, timeout=timeout_s)

    def take(self, reply: pb.GenerateReply) -> Reply | None:
        """Record a reply; return it unless it is a repeated Started, with which every stream begins."""
        received = reply_from_proto(reply)
        if isinstance(received, Started):
            again, self._started = self._started, True
            self._rest.session_id, self._began = received.session_id, time.monotonic()
            return None if again else received
        if isinstance(received, Tokens):
            self._rest.from_position += len(received.token_ids)
            self._rest.tail.extend(received.token_ids)
        return received

    def may_retry(self, now: float) -> bool:
        """Return whether to retry after a break at this time of a monotonic clock."""
        self._first_tries -= 1
        if self._rest.from_position > self._since or self._give_up is None:
            self._give_up = now + RESUME_FOR_S
        elif self._began < math.inf:  # the time of an accepted stream, such as in a queue, does not count
            self._give_up += now - self._began
        return now <= self._give_up and (self._started or self._first_tries > 0)

    def pause_s(self, error: OutriderError, now: float) -> float:
        """Return how long to wait before the next stream: as long as it says, once each endpoint was asked."""
        self._failures += 1
        wanted_s = 0 if self._failures % self._endpoints else min(RESUME_FOR_S, (error.retry_after_ms or 0) / 1000)
        return max(RETRY_S, wanted_s if self._until is None else min(wanted_s, self._until - now))


def resume_request(session_id: str, position: int, tail: Sequence[int]) -> pb.ResumeRequest:
    """Return the message that resumes a session; raise InvalidRequest for one that cannot be made."""
    with checked_fields():
        return pb.ResumeRequest(session_id=session_id, from_position=position, tail=tail)


def endpoints_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the endpoints of a client; a single one may be given as it is."""
    endpoints = (given,) if isinstance(given, str) else tuple(given)
    if not all(endpoints) or not endpoints:
        raise InvalidRequest.of("endpoints", endpoints, "one address HOST:PORT or several")
    return endpoints


class EndpointRotation:
    """Choice of a client's endpoint, shared by all its requests."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.present = 0

    def leave(self, endpoint: int, error: OutriderError) -> None:
        """Switch to the next endpoint after a failure of it; of concurrent failures only the first switches."""
        if endpoint == self.present and error.field != _PAUSED:
            self.present = (endpoint + 1) % self._count

    @contextlib.contextmanager
    def attempt(self, *, last: bool) -> Iterator[int]:
        """Yield the endpoint to ask, and switch to the next one if it fails; raise its error if there is no other."""
        endpoint = self.present
        try:
            with outrider_errors("there was a reply"):
                yield endpoint
        except (PeerLost, Unavailable, Expired) as error:  # of one that hangs, too
            self.leave(endpoint, error)
            if last:
                raise


@contextlib.contextmanager
def outrider_errors(awaited: str = "the output was complete") -> Iterator[None]:
    """Convert gRPC errors, of both kinds of stubs, to OutriderErrors."""
    try:
        yield
    except grpc.RpcError as error:
        meant = error_from_rpc(error)
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not isinstance(meant, Expired):  # the client's own
            meant = Expired(f"the deadline passed before {awaited}")
        if meant.field == _PAUSED:
            meant = PeerLost(meant.message, field=_PAUSED)
        raise meant from error
