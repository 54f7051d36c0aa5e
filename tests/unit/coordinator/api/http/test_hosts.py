"""Host headers: which ones a coordinator serves, by the address at which it listens."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from coordinator.api.http.hosts import RequestChecks, hosts_of


async def _answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("served")


def _status(listener: str, allowed: list[str], host: str) -> int:
    checks = Middleware(RequestChecks, hosts=hosts_of(listener, allowed), origins=frozenset[str]())
    app = Starlette(routes=[Route("/metrics", _answer)], middleware=[checks])
    return TestClient(app).get("/metrics", headers={"Host": host}).status_code


@pytest.mark.parametrize("host", ["coordinator", "coordinator:8000", "172.18.0.5:8000", "[fd00::5]:8000", "localhost"])
def test_prometheus_scrapes_by_address_where_names_are_limited(host: str) -> None:
    """As in Compose: it finds each replica's address by DNS."""
    assert _status("0.0.0.0", ["coordinator"], host) == 200


@pytest.mark.parametrize("host", ["evil.example", "172.18.0.5.evil.example", "0x7f.1", "[", "any IP address"])
def test_other_names_are_refused_there(host: str) -> None:
    assert _status("0.0.0.0", ["coordinator"], host) == 403


@pytest.mark.parametrize(("allowed", "host", "status"), [([], "172.18.0.5", 403), (["proxy"], "172.18.0.5", 403)])
def test_a_listener_on_loopback_serves_no_other_address(allowed: list[str], host: str, status: int) -> None:
    assert _status("127.0.0.1", allowed, host) == status


def test_without_allowed_hosts_any_name_reaches_a_public_listener() -> None:
    assert _status("0.0.0.0", [], "anything.example") == 200
