"""The embedded Redis: no port, a socket for one user, and data that outlive it where they are wanted."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis
import structlog

from outrider.launch.state import state_folder
from outrider.protocol.errors import StartupError
from outrider.runtime.embedded_redis import check_redis, embedded_redis
from tests.cluster import environment, until
from tests.descriptors import listening_ports, open_files

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")


def pid_of(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def socket_of(url: str) -> Path:
    return Path(url.removeprefix("unix://"))


def test_it_has_no_port_and_a_socket_of_our_own() -> None:
    with embedded_redis() as url:
        assert listening_ports(pid_of(url)) == []
        for path in (socket_of(url), socket_of(url).parent):
            assert path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0, path
            assert path.stat().st_uid == os.getuid()
    assert not socket_of(url).parent.exists()


@pytest.mark.parametrize("name", ["a#", "a?", "a%41 "])
def test_its_url_leads_to_folders_of_any_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a URL ends at # and ?, and %41 is an A there."""
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with embedded_redis() as url:
            assert pid_of(url)


def test_what_is_written_outlives_a_crash(tmp_path: Path) -> None:
    with embedded_redis(tmp_path) as url:
        with redis.Redis.from_url(url) as client:
            client.hset("session", mapping={"epoch": 3})
            client.expire("session", 3600)
        crashed = pid_of(url)
        os.kill(crashed, signal.SIGKILL)
    with embedded_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.hget("session", "epoch") == b"3"
        assert 0 < int(client.ttl("session")) <= 3600


@pytest.mark.parametrize("kept", [True, False])
def test_a_server_that_dies_is_started_again_with_its_data(tmp_path: Path, kept: bool) -> None:
    with embedded_redis(tmp_path if kept else None) as url, redis.Redis.from_url(url) as client:
        client.set("a", "b")
        first = pid_of(url)
        assert os.getsid(first) == first, "a signal to the group of who started it does not reach it"
        os.kill(first, signal.SIGKILL)

        def again() -> bool:
            try:
                return pid_of(url) != first
            except redis.ConnectionError:
                return False

        until(again, 20, "another server")
        assert client.get("a") == b"b"
        second = pid_of(url)
    assert not (Path("/proc") / str(second)).exists()


def test_a_server_that_cannot_be_started_again_is_no_obstacle_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded_redis(tmp_path) as url:
        refusing = tmp_path / "refusing"
        refusing.write_text("#!/bin/sh\necho no room for this >&2\nexit 1\n")
        refusing.chmod(0o700)
        monkeypatch.setattr("outrider.runtime.embedded_redis.get_binary_path", lambda: refusing)
        os.kill(pid_of(url), signal.SIGKILL)
        with structlog.testing.capture_logs() as logs:
            until(lambda: any("retrying" in line["event"] for line in logs), 20, "second attempt")
        assert "no room for this" in logs[-1]["error"]
    assert (tmp_path / "appendonlydir").exists(), "the data are not at fault"
    assert not list(tmp_path.glob("*unreadable*"))


def test_a_server_that_blames_data_that_are_not_there_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "refusing"
    refusing.write_text("#!/bin/sh\necho cannot open AOF: no room >&2\nexit 1\n")
    refusing.chmod(0o700)
    monkeypatch.setattr("outrider.runtime.embedded_redis.get_binary_path", lambda: refusing)
    with pytest.raises(StartupError, match="no room"), embedded_redis(tmp_path / "data"):
        pytest.fail("it has started")


@pytest.mark.parametrize(
    "url", ["me:secret@127.0.0.1:6379", "redis:/me:secret@127.0.0.1:6379", "me:s?cr:e//t@127.0.0.1:6379"]
)
def test_the_password_of_a_url_without_a_scheme_is_not_told(url: str) -> None:
    with pytest.raises(StartupError, match=r"Redis cannot be used at 127\.0\.0\.1:6379: not a valid URL"):
        check_redis(url)


@pytest.mark.parametrize("options", ["password=se@cret", "db=1&password=se@cret"])
def test_a_password_among_the_options_of_a_url_is_not_told(options: str) -> None:
    """Redis's client takes one there, with an @ as it is."""
    with pytest.raises(StartupError, match=r"Redis cannot be used at redis://127\.0\.0\.1:1/0: ConnectionError"):
        check_redis(f"redis://127.0.0.1:1/0?{options}")


def test_unreadable_data_are_put_aside(tmp_path: Path) -> None:
    with embedded_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("a", "b")
    for file in (tmp_path / "appendonlydir").iterdir():
        file.write_bytes(b"\xff" * 100)
    with embedded_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("a") is None
    assert list(tmp_path.glob("appendonlydir.unreadable-*"))


def test_what_a_killed_process_left_is_removed_by_the_next(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and keys are in it, and no one else removes what a process of SIGKILL left in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    monkeypatch.setenv("OUTRIDER_HOME", str(short_path / "home"))
    holds = (
        "import sys, time\nfrom outrider.launch.state import state_folder\n"
        "from outrider.runtime.embedded_redis import embedded_redis\n"
        "with state_folder('', 0) as state, embedded_redis() as url:\n    print(url, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds], env=environment(TMPDIR=str(short_path)), stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        server = pid_of(killed.stdout.readline().strip())
        killed.kill()
    until(lambda: not (Path("/proc") / str(server)).exists(), 10, "the server's end")
    assert len(left := list(short_path.glob("outrider-*"))) == 2
    with state_folder("", 0) as state, embedded_redis() as url:
        running = {state.folder, socket_of(url).parent}
        assert {*short_path.glob("outrider-*")} == {*left, *running}, "they are new, and so may not be locked yet"
        (short_path / "outrider-redis-file").touch()
        for each in short_path.glob("outrider-*/lock"):
            os.utime(each, (0, 0))
        with state_folder("", 0), embedded_redis():
            assert all(each.exists() for each in running), "they are in use"
            assert not any(each.exists() for each in left)
            assert pid_of(url)


def test_a_state_folder_is_private_and_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.launch.state.LEAVING_S", 0.2)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    with state_folder("", 50050) as first, state_folder("", 50050) as second, state_folder("", 50051) as third:
        assert first.kept
        assert third.kept
        assert not second.kept, "the folder is held: what this run writes ends with it"
        assert len({first.folder, second.folder, third.folder}) == 3
        for state in (first, second):
            assert state.folder.stat().st_mode & 0o777 == 0o700
            assert state.data.stat().st_mode & 0o777 == 0o700
        key = first.key("fleet-key")
        assert key.stat().st_mode & 0o777 == 0o600
        made_up = key.read_text()
        assert len(made_up.strip()) >= 32
    assert not second.folder.exists()
    with state_folder("", 50050) as again:
        assert again.folder == first.folder
        assert again.key("fleet-key").read_text() == made_up, "workers that joined know this one"
    with state_folder("", 0) as random_port:
        assert not random_port.kept


def test_a_key_that_an_interrupted_run_left_empty_is_made(tmp_path: Path) -> None:
    with state_folder(str(tmp_path / "mine"), 0) as mine:
        (mine.folder / "fleet-key").touch()
        key = mine.key("fleet-key")
        assert len(key.read_text().strip()) >= 32
        assert key.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_told_by_the_path_of_the_key(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with state_folder(str(tmp_path / "mine"), 0) as mine:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            with pytest.raises(StartupError) as told:
                mine.key("fleet-key")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(mine.folder / "fleet-key") in told.value.message
        assert len(mine.key("fleet-key").read_text().strip()) >= 32


def test_a_named_state_folder_that_is_held_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.launch.state.LEAVING_S", 0.2)
    with state_folder(str(tmp_path / "mine"), 0) as mine:
        assert mine.kept
        with pytest.raises(StartupError, match="in use by another"), state_folder(str(tmp_path / "mine"), 0):
            pass
    with state_folder(str(tmp_path / "mine"), 0):
        pass


def test_the_lock_lives_as_long_as_the_server_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that outlives who started it must not find a second one at its files."""
    monkeypatch.setattr("outrider.launch.state.LEAVING_S", 0.2)
    with state_folder(str(tmp_path), 0) as state, embedded_redis(state.data, holding=[state.lock]) as url:
        server = pid_of(url)
        assert str(tmp_path / "lock") in open_files(server)
    until(lambda: not (Path("/proc") / str(server)).exists(), 5, "the server's end")
