"""The load test as people run it, against a real fleet over gRPC and HTTP: alone, with workers, with its web page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.__main__ import LOCUSTFILE
from loadtest.report.summary import Summary
from outrider.security.channels import Channels
from outrider.security.tls import Tls
from tests.certificates import Authority
from tests.cluster import ROOT, SLOWER, Cluster, environment, free_port, speculation_counters, until
from tests.conftest import Models

pytestmark = pytest.mark.timeout(240)

LIMIT_S = 180.0
SOON_S = 60.0
API_KEY = "open-sesame-4711"
FEW = ("--max-tokens", "16", "--kinds", "chat,code")  # quickly answered


def addresses(fleet: Cluster) -> list[str]:
    web = fleet.coordinators[0].web.removeprefix("http://")
    return ["--endpoint", fleet.address, "--http-endpoint", web]


def run(fleet: Cluster, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtest", *addresses(fleet), "--report", str(folder), *FEW, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=LIMIT_S,
        check=False,
    )


def loadtest(fleet: Cluster, folder: Path, *flags: str) -> tuple[int, Summary]:
    done = run(fleet, folder, *flags)
    assert (folder / "summary.json").exists(), done.stdout + done.stderr + (folder / "locust.log").read_text()
    return done.returncode, Summary.load_from(folder / "summary.json")


@pytest.mark.prove
def test_a_spike_over_both_protocols_changes_no_text(cluster: Cluster, tmp_path: Path) -> None:
    before = speculation_counters(cluster.coordinators[0])
    flags = ("--shape", "spike", "--users", "4", "--times", "2", "--seconds", "9", "--gamma", "3")
    code, summary = loadtest(cluster, tmp_path, *flags)
    after = speculation_counters(cluster.coordinators[0])
    assert (code, summary.verdict, summary.errors) == (0, "", {}), (tmp_path / "locust.log").read_text()
    assert [(part.name, part.users) for part in summary.parts] == [("before", 4), ("peak", 8), ("after", 4)]
    assert all(part.compared and part.tokens_per_s > 0 for part in summary.parts)
    told = (summary.all.checked_steps, summary.all.guesses, summary.all.accepted)
    assert told == tuple(after[name] - before[name] for name in after), "clients and coordinator count the same"
    assert summary.all.accepted > 0
    assert summary.recovery is not None
    sorts = {(sort.protocol, sort.kind): sort for sort in summary.sorts}
    for protocol in ("grpc", "http"):
        merge_all = sorts[protocol, ""]
        assert merge_all.compared == merge_all.requests > 0
        assert None not in (merge_all.first_token_ms.p99, merge_all.inter_token_ms.p99, merge_all.total_ms.p99)
        assert 0 < merge_all.tokens <= 16 * merge_all.requests
    report = (tmp_path / "report.html").read_text()
    assert "✓ Passed." in report
    assert ">both<" in report


@pytest.mark.prove
def test_the_shares_are_kept(cluster: Cluster, tmp_path: Path) -> None:
    code, summary = loadtest(cluster, tmp_path, "--users", "3", "--seconds", "1", "--grpc-share", "0")
    assert (code, summary.errors) == (0, {})
    assert {sort.protocol for sort in summary.sorts} == {"http"}


@pytest.fixture(scope="module")
def narrow(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A fleet that takes few sessions and sends others away. It waits in its steps, so its requests cost little."""
    fleet = Cluster(tmp_path_factory.mktemp("narrow"))
    fleet.add_coordinator("--max-sessions", "4")  # room for two users whose last sessions are just ending
    fleet.add_verifier(models.target, *SLOWER)
    fleet.start()
    yield fleet
    fleet.stop()


def test_an_overload_is_shed_and_the_fleet_comes_back(narrow: Cluster, tmp_path: Path) -> None:
    flags = ("--shape", "overload", "--users", "2", "--capacity", "4", "--times", "3", "--seconds", "12")
    code, summary = loadtest(narrow, tmp_path, *flags)
    assert (code, summary.verdict, summary.errors) == (0, "", {}), (tmp_path / "locust.log").read_text()
    before, peak, after = summary.parts
    assert (before.users, peak.users, after.users) == (2, 12, 2)
    assert (before.shed, after.shed) == (0, 0)
    assert peak.shed > 0
    assert {sort.protocol for sort in summary.sorts if sort.shed and not sort.kind} == {"grpc", "http"}
    assert summary.recovery is not None
    assert "Shed and failed per second" in (tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def locked(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, list[str]]]:
    """A fleet that asks for keys and certificates, and what opens it."""
    folder = tmp_path_factory.mktemp("locked")
    authority = Authority.make(folder)
    pair = authority.issue("fleet")
    tls = ["--tls-ca", str(authority.path), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    access = Channels(Tls.load(ca=str(authority.path), cert=str(pair.cert), key=str(pair.key)), API_KEY)
    fleet = Cluster(folder, flags=[*tls, "--tls-client-auth", "--fleet-key", "secret"], access=access)
    fleet.add_coordinator("--api-keys", API_KEY)
    fleet.add_verifier(models.target)
    fleet.start()
    yield fleet, tls
    fleet.stop()


def test_keys_and_certificates_open_both_protocols(locked: tuple[Cluster, list[str]], tmp_path: Path) -> None:
    fleet, tls = locked
    (tmp_path / "key").write_text(f"{API_KEY}\n")
    flags = ("--users", "2", "--seconds", "1", "--api-key", f"@{tmp_path / 'key'}", *tls)
    code, summary = loadtest(fleet, tmp_path, *flags)
    assert (code, summary.errors) == (0, {}), (tmp_path / "locust.log").read_text()
    assert {sort.protocol for sort in summary.sorts} == {"grpc", "http"}
    for file in tmp_path.iterdir():
        assert file.name == "key" or API_KEY not in file.read_text(), f"{file.name} holds the key"


@pytest.mark.parametrize("share", ["--grpc-share", "--http-share"])
def test_a_wrong_key_opens_neither(locked: tuple[Cluster, list[str]], tmp_path: Path, share: str) -> None:
    fleet, tls = locked
    flags = ("--users", "2", "--seconds", "1", "--api-key", "another", share, "0", *tls)
    done = run(fleet, tmp_path, *flags)
    assert done.returncode == 1
    assert "cannot start: " in (tmp_path / "locust.log").read_text()
    assert not (tmp_path / "summary.json").exists()


@contextmanager
def locust(*flags: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    line = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(
            line, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(), start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.mark.prove
def test_workers_records_become_one_report(cluster: Cluster, tmp_path: Path) -> None:
    """Workers are told where to go, and what the right answers are, by their master alone."""
    port = str(free_port())
    figures, log = tmp_path / "summary.json", tmp_path / "master.log"
    headless = ("--headless", "--expect-workers", "2", "-u", "4", "-r", "4", "-t", "3s", "--summary", str(figures))
    worker = ("--worker", "--master-port", port)
    with (
        locust("--master", "--master-bind-port", port, *headless, *addresses(cluster), *FEW, log=log) as master,
        locust(*worker, log=tmp_path / "one.log"),
        locust(*worker, log=tmp_path / "two.log"),
    ):
        assert master.wait(LIMIT_S) == 0, log.read_text()
    summary = Summary.load_from(figures)
    assert (summary.verdict, summary.errors) == ("", {})
    assert {sort.protocol for sort in summary.sorts} == {"grpc", "http"}
    assert summary.all.compared == summary.all.requests > 0
    assert max(summary.series.users) == 4
    assert summary.tokens_per_s > 0


@pytest.mark.prove
def test_the_web_page_changes_the_load_but_not_where_it_goes(cluster: Cluster, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "locust.log"
    web = f"http://127.0.0.1:{port}"
    flags = ("--web-port", str(port), "--api-key", "secret-key", "--max-users", "5")
    with locust(*flags, *addresses(cluster), *FEW, log=log):
        page = until(lambda: get(web), SOON_S, log.read_text())
        for shown in ("grpc_share", "http_share", "kinds", "max_tokens", "overload", "times"):
            assert shown in page
        for hidden in ("secret-key", "allow_remote", "http_endpoint", "max_users"):
            assert hidden not in page
        assert get(f"{web}/report") == ""
        given = {"user_count": "3", "spawn_rate": "3", "run_time": "2s", "shape": "spike", "times": "1.5"}
        elsewhere = {"endpoint": "10.0.0.1:1", "http_endpoint": "10.0.0.1:2", "allow_remote": "true", "timeout_s": "1"}
        post(f"{web}/swarm", **given, **elsewhere)
        until(lambda: "Shape test stopping" in log.read_text(), SOON_S, "the end of the run")
        report = get(f"{web}/report")
        assert "✓ Passed." in report
        assert cluster.address in report
        assert "10.0.0.1" not in report
        post(f"{web}/swarm", **given | {"shape": "steady", "user_count": "6"})
        until(lambda: "at most 5 at the peak" in log.read_text(), SOON_S, "a refusal")
        post(f"{web}/swarm", **given | {"shape": "steady", "user_count": "2", "http_share": "0"})
        until(lambda: log.read_text().count("Shape test stopping") == 3, SOON_S, "the end of another run")
        report = get(f"{web}/report")
        assert "Outrider under load: steady" in report
        assert ">http<" not in report


def get(url: str) -> str:
    """Empty where there is nothing (yet)."""
    try:
        with urllib.request.urlopen(url, timeout=SOON_S) as reply:
            return str(reply.read().decode())
    except OSError:
        return ""


def post(url: str, **fields: str) -> None:
    data = urllib.parse.urlencode(fields).encode()
    with urllib.request.urlopen(url, data=data, timeout=SOON_S) as reply:
        assert reply.status == 200
