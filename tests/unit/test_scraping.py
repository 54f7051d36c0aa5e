"""The metrics port of a worker: its key, its certificate, and what slow or many callers come to."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from drafter.settings import DrafterSettings
from outrider import scraping
from outrider.errors import StartupError
from outrider.metrics import DrafterMetrics
from outrider.scraping import MOST, MetricsServer
from tests.certificates import Authority
from tests.cluster import free_port, until


@contextmanager
def serving(**settings: Any) -> Iterator[int]:
    port = free_port()
    server = MetricsServer(DrafterMetrics("m", "ngram"), DrafterSettings(metrics_port=port, **settings))
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


def test_tls(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    mine = authority.issue("worker")
    with serving(metrics_tls=True, tls_cert=str(mine.cert), tls_key=str(mine.key)) as port:
        assert scrape(port, tls=ssl.create_default_context(cafile=str(authority.path))) == 200
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            scrape(port)
    with pytest.raises(StartupError, match="tls_cert"):
        MetricsServer(DrafterMetrics("m", "ngram"), DrafterSettings(metrics_tls=True))


def test_slow_callers_are_hung_up_on_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S", 1.0)
    with serving() as port, ExitStack() as stack:
        began = time.monotonic()
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(2 * MOST)]
        while time.monotonic() - began < 1.5:
            for one in slow:
                with suppress(OSError):  # hung up on, as it should be
                    one.sendall(b"G")
            time.sleep(0.2)
        until(lambda: scrape(port) == 200, 5, "room for Prometheus")
