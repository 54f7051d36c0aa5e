"""Protection by framing, Host and Origin headers, against request smuggling, DNS rebinding and cross-site requests."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.http.failures import respond
from outrider.base.endpoint import address, is_loopback
from outrider.protocol.errors import InvalidRequest, shorten

ANY = "*"
ADDRESSES = "any IP address"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def hosts_of(host: str, allowed: Iterable[str]) -> frozenset[str]:
    """Return the names a Host header may have at `host`: others mean DNS rebinding, on loopback addresses too."""
    names = frozenset((name.partition(":")[0] if name.count(":") == 1 else name).lower() for name in allowed)
    if is_loopback(host):
        return names | LOOPBACK | {host.lower(), ""}  # HTTP/1.0 clients send none, and browsers do not use it
    return names | LOOPBACK | {host.lower(), "", ADDRESSES} if names else frozenset({ANY})


class RequestChecks:
    """Middleware that rejects bodies with two lengths, foreign Hosts, and unsafe requests from foreign origins."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        fault = self._origin_fault(headers, scope["method"])
        if "transfer-encoding" in headers and "content-length" in headers:
            fault = InvalidRequest("Content-Length and Transfer-Encoding exclude each other", field="body"), 400
        if fault is None:
            await self._app(scope, receive, send)
            return
        reply = respond(*fault)
        reply.headers["Connection"] = "close"  # the following bytes may be a part of a request
        await reply(scope, receive, send)

    def _origin_fault(self, headers: Headers, method: str) -> tuple[InvalidRequest, int] | None:
        host = headers.get("host", "")
        name = _parsed(f"//{host}").hostname or ""
        if self._hosts.isdisjoint({ANY, name}) and (ADDRESSES not in self._hosts or address(name) is None):
            message = f"Host {shorten(repr(host))} is not served here; --allowed-hosts names further ones"
            served = ", ".join(sorted(self._hosts - {""}))
            return InvalidRequest(message, field="Host", value=host, limit=served), 403
        origin = headers.get("origin")
        own = origin is None or _parsed(origin).netloc.lower() == host.lower()
        if own or method in _SAFE or not self._origins.isdisjoint({ANY, origin}):
            return None
        message = f"pages of {shorten(repr(origin))} may not call this; --cors-origins names those that may"
        return InvalidRequest(message, field="Origin", value=origin, limit=host), 403


def _parsed(url: str) -> SplitResult:
    """Return the parts of a URL; an invalid one has a host that no request names."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("// ")
