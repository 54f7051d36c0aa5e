"""The metrics port of a worker: its key, its certificate, and what slow or many callers come to."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.base.aio import background
from outrider.base.aio import until as soon
from outrider.observability import metrics_server
from outrider.observability.metrics import DrafterMetrics
from outrider.observability.metrics_server import MOST, MetricsServer
from outrider.protocol.errors import StartupError
from outrider.security import credentials
from outrider.security.credentials import Credentials
from outrider.settings.drafter import DrafterSettings
from tests.certificates import Authority
from tests.cluster import free_port, until


@contextmanager
def serving(**settings: Any) -> Iterator[int]:
    port = free_port()
    given = DrafterSettings(metrics_port=port, **settings)
    server = MetricsServer(DrafterMetrics("m", "ngram"), given, Credentials(given))
    server.open()
    try:
        yield port
    finally:
        server.close()


def scrape(port: int, key: str = "", tls: ssl.SSLContext | None = None) -> int:
    kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    more: Any = {} if tls is None else {"context": tls}
    connection = kind("127.0.0.1", port, timeout=10, **more)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
    answer = connection.getresponse()
    assert (b"outrider_drafter_sessions" in answer.read()) == (answer.status == 200)
    connection.close()
    return answer.status


def test_a_key_is_asked_for() -> None:
    with serving(metrics_key="secret") as port:
        assert [scrape(port), scrape(port, "wrong"), scrape(port, "secret")] == [401, 401, 200]
    with serving() as port:
        assert scrape(port) == 200


async def test_key_and_certificate_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "LOOK_S", 0.05)
    authority = Authority.make(tmp_path)
    trusting = ssl.create_default_context(cafile=str(authority.path))
    key, cert, private = (tmp_path / name for name in ("key", "tls.pem", "tls.key"))

    def put(name: str) -> None:
        key.write_text(name)
        mine = authority.issue(name)
        cert.write_bytes(mine.cert.read_bytes())
        private.write_bytes(mine.key.read_bytes())

    put("old")
    files = {"metrics_key": f"@{key}", "tls_cert": str(cert), "tls_key": str(private)}
    given = DrafterSettings(metrics_port=free_port(), metrics_tls=True, **files)
    current = Credentials(given)
    server = MetricsServer(DrafterMetrics("m", "ngram"), given, current)
    server.open()
    try:
        async with background(current.follow()):
            put("new")
            assert await soon(lambda: current.keys["metrics_key"].first == "new", 10)
            assert await soon(lambda: current.tls is not None and current.tls.cert == cert.read_bytes(), 10)
        assert ssl.get_server_certificate(("127.0.0.1", given.metrics_port)).split() == cert.read_text().split()
        found = [scrape(given.metrics_port, shown, trusting) for shown in ("old", "new")]
        assert found == [401, 200]
    finally:
        server.close()


def test_tls(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    mine = authority.issue("worker")
    with serving(metrics_tls=True, tls_cert=str(mine.cert), tls_key=str(mine.key)) as port:
        assert scrape(port, tls=ssl.create_default_context(cafile=str(authority.path))) == 200
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            scrape(port)
    given = DrafterSettings(metrics_tls=True)
    with pytest.raises(StartupError, match="tls_cert"):
        MetricsServer(DrafterMetrics("m", "ngram"), given, Credentials(given))


def test_slow_callers_are_hung_up_on_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 1.0)
    with serving() as port, ExitStack() as stack:
        began = time.monotonic()
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(2 * MOST)]
        while time.monotonic() - began < 1.5:
            for one in slow:
                with suppress(OSError):  # hung up on, as it should be
                    one.sendall(b"G")
            time.sleep(0.2)
        until(lambda: answers(port), 5, "a free seat for Prometheus")


def test_a_request_for_which_no_thread_can_be_started_takes_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving() as port:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", none_left)
            assert not any(answers(port) for _ in range(MOST))
        until(lambda: answers(port), 5, "a free seat for Prometheus")


def answers(port: int) -> bool:
    """Whether a scrape is answered now; False while every seat is taken."""
    try:
        return scrape(port) == 200
    except (ConnectionError, http.client.HTTPException):
        return False
