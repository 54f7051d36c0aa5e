"""Parsing of endpoints, and the rule that load goes to this machine unless remote hosts are allowed."""

from __future__ import annotations

import ipaddress

from outrider.protocol.errors import InvalidRequest

_FORM = "host:port, or [address]:port for IPv6"
ANY_HOST = ("0.0.0.0", "::")  # noqa: S104  # to listen on all interfaces; no certificate names them


def split(endpoint: str, *, lowest_port: int = 1) -> tuple[str, int]:
    """Return the host and the port of `host:port`."""
    host, _, port = endpoint.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "/" in host:
        host = ""  # a gRPC target such as dns:///name would hide the host
    if not host or not (port.isascii() and port.isdigit()) or not lowest_port <= int(port) <= 65535:
        raise InvalidRequest.of("endpoint", endpoint, _FORM)
    return host, int(port)


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host is; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def bracketed(host: str) -> str:
    """Return a host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    return host == "localhost" or ((found := address(host)) is not None and found.is_loopback)


def allowed(endpoints: str, *, allow_remote: bool, lowest_port: int = 1) -> list[str]:
    """Return the endpoints of a comma-separated list. Raise InvalidRequest for a remote one that is not allowed."""
    given = [part.strip() for part in endpoints.split(",") if part.strip()]
    if not given:
        raise InvalidRequest.of("endpoint", endpoints, _FORM)
    for endpoint in given:
        host, _ = split(endpoint, lowest_port=lowest_port)
        if not allow_remote and not is_loopback(host):
            raise InvalidRequest.of("endpoint", endpoint, "on this machine (loopback) unless --allow-remote is given")
    return given
