"""`outrider doctor` names a GPU that cannot be used, and counts the memory that a start can have."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
import torch
from typer.testing import CliRunner

from outrider.cli import doctor
from outrider.cli.app import app
from outrider.engine.native import build
from tests.cluster import Redis, free_port


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "bad"),
        ("No CUDA GPUs are available", "note"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_bad(monkeypatch: pytest.MonkeyPatch, reason: str, state: str) -> None:
    def init() -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    (found,) = [finding for finding in doctor._torch() if finding.name == "device"]
    assert found.state == state
    assert (reason in found.text) == (state == "bad")


def test_memory_that_caches_files_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has read many files has hardly any free memory, and is well."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_AVPHYS_PAGES" else 4096)
    found = next(finding for finding in doctor._memory() if finding.name == "memory")
    assert not found.text.startswith("0.0 GiB")


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_cannot_be_is_not_in_use(port: str) -> None:
    result = CliRunner().invoke(app, ["doctor", f"--port={port}"])
    assert (result.exit_code, "Invalid value for '--port'" in result.output) == (2, True)


@pytest.mark.parametrize(("entered", "written"), [(False, False), (True, False), (True, True)])
def test_a_home_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entered: bool, written: bool
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("OUTRIDER_HOME", str(home))
    monkeypatch.setattr(os, "access", lambda *_: written)
    if not entered:
        monkeypatch.setattr(Path, "stat", _locked)
    disk = next(finding for finding in doctor._memory() if finding.name == "disk")
    assert (disk.state == "ok", "cannot be written" in disk.text) == (written, not written)
    assert [finding.state for finding in doctor._models(doctor.DEFAULT)] == ["note"]


def test_a_torch_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    """In a process of its own: here, torch is loaded."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open it')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-c",
        "from outrider.cli import main; main()",
        "doctor",
        f"--endpoint=127.0.0.1:{free_port()}",
    ]
    variables = os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    (line,) = [line for line in done.stdout.splitlines() if "libtorch_cpu.so" in line]
    assert (done.returncode, line.split()[:2]) == (1, ["bad", "torch"]), done.stderr
    assert "coordinator" in done.stdout, "the other checks follow"


@pytest.mark.parametrize(
    ("arguments", "variables", "name"),
    [([], {"REDIS_URL": "@/nowhere"}, "redis"), (["--tls-ca=/nowhere"], {}, "coordinator")],
)
def test_a_check_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str], name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(app, ["doctor", f"--endpoint=127.0.0.1:{free_port()}", *arguments])
    states = {line.split()[1]: line.split()[0] for line in result.output.splitlines() if line.split()}
    assert (result.exit_code, states[name]) == (1, "bad"), result.output
    assert {"python", "torch", "memory", "redis", "port", "coordinator"} <= states.keys()
    assert "cannot read /nowhere" in result.output


def test_a_target_whose_config_has_values_of_other_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_torch", "_memory", "_redis"):
        monkeypatch.setattr(doctor, name, lambda: ())
    for hidden, found in (('"64"', "bad"), ("64", "ok")):
        (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "hidden_size": {hidden}}}')
        line = ["doctor", "--endpoint", "127.0.0.1:1", "--target", str(tmp_path)]
        result = CliRunner().invoke(app, line, env={"COLUMNS": "300"})
        assert re.search(rf"{found} +target ", result.output), result.output
        assert ("'hidden_size' expected int" in result.output) == (found == "bad")


def test_code_in_a_targets_folder_is_neither_run_nor_asked_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers asks on standard input, and a verifier would refuse the model."""
    for name in ("_torch", "_memory", "_redis"):
        monkeypatch.setattr(doctor, name, lambda: ())
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    line = ["doctor", "--endpoint", "127.0.0.1:1", "--target", str(tmp_path)]
    result = CliRunner().invoke(app, line, input="y\n", env={"COLUMNS": "300"})
    assert re.search(r"bad +target .*custom code", result.output), result.output
    assert "[y/N]" not in result.output
    assert not (tmp_path / "ran").exists()


def _locked(path: Path, **_: object) -> os.stat_result:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


@pytest.mark.parametrize(
    ("fault", "compiler"),
    [
        ("the kernels cannot be kept or loaded: [Errno 30]", False),
        ("there is no C compiler (cc)", True),
        ("/usr/bin/cc failed: no file stdio.h", True),
    ],
)
def test_a_compiler_is_asked_for_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, fault: str, compiler: bool
) -> None:
    monkeypatch.setattr(build, "find_library", lambda: fault)
    (found,) = doctor._kernels()
    assert ("gcc" in found.advice, fault in found.text) == (compiler, True)


def test_no_path_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / ("x" * 100)))
    for name in ("_torch", "_memory", "_redis"):
        monkeypatch.setattr(doctor, name, lambda: ())
    result = CliRunner().invoke(app, ["doctor", "--endpoint", "127.0.0.1:1"], env={"COLUMNS": "80"})
    assert result.output.count("x") >= 100


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ECHO well", ""),
        ("REPLICAOF 127.0.0.1 1", "ReadOnlyError"),
        ("CONFIG SET maxmemory 1", "OutOfMemoryError"),
        ("CLUSTER ADDSLOTSRANGE 0 16383", "ClusterCrossSlotError"),  # it has the slot of any key
    ],
)
def test_a_redis_that_refuses_writes_is_bad(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, name: str
) -> None:
    """It answers a ping, and a coordinator takes it for down."""
    clustered = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf")]
    clustered += ["--cluster-port", str(free_port())]  # that of its own is this one and 10,000, which may be too many
    server = Redis(tmp_path, *(clustered * ("CLUSTER" in command))).start().wait_ready(10)
    monkeypatch.setenv("REDIS_URL", server.url)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(*command.split())  # type: ignore[no-untyped-call]
        while "CLUSTER" in command and "'cluster_state': 'ok'" not in str(client.execute_command("CLUSTER INFO")):  # type: ignore[no-untyped-call]
            time.sleep(0.05)
    (found,) = doctor._redis()
    server.stop()
    assert (found.state, name in found.text) == ("bad" if name else "ok", True), found
