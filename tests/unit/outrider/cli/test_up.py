"""`outrider up`: its flags, its file, its signals. That it runs is tests/e2e/test_up.py's."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from outrider.base.config import PREFIX
from outrider.cli import up
from outrider.cli.app import app
from outrider.launch.stack import Child, LaunchPlan, Stack, with_certificate
from outrider.protocol.errors import InvalidRequest, StartupError
from tests.certificates import Authority
from tests.cluster import ROOT

FILE = """
target = "./Big"
http-port = 9000
verifiers = 2
[verifier]
max-sessions = 5
"""


class Reached(Exception):
    """The services would now be started."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """What would have been started."""
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    caught: list[LaunchPlan] = []

    @contextlib.contextmanager
    def pretend(plan: LaunchPlan, *_: object) -> Iterator[None]:
        caught.append(plan)
        raise Reached
        yield

    monkeypatch.setattr(up, "stack", pretend)
    monkeypatch.setattr(up, "end_on_signals", lambda: None)
    monkeypatch.setattr(up, "set_up_logs", lambda *_, **__: None)
    return caught


def run(*line: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["up", *line], env={PREFIX + name: value for name, value in variables.items()})


def test_flags_go_before_variables_and_these_before_the_file(plans: list[LaunchPlan], tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(FILE)
    for line, variables, expected in (
        ([], {}, ("./Big", 9000, 2)),
        ([], {"HTTP_PORT": "9001", "VERIFIERS": "3"}, ("./Big", 9001, 3)),
        (["--verifiers", "4"], {"HTTP_PORT": "9001", "VERIFIERS": "3"}, ("./Big", 9001, 4)),
    ):
        result = run("--config", str(file), *line, **variables)
        assert isinstance(result.exception, Reached), result.output
        plan = plans.pop()
        assert (plan.target, plan.http_port, plan.verifiers) == expected
        assert plan.port == 50050, "the default"
        assert plan.overrides["verifier"]["max_sessions"].value == 5


def test_settings_on_the_line_go_before_the_file(plans: list[LaunchPlan], tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(FILE)
    run("--set", "verifier.max-sessions=6", "--set", "drafter.threads=2", CONFIG=str(file))
    overrides = plans.pop().overrides
    assert overrides["verifier"]["max_sessions"].value == "6"
    assert overrides["drafter"]["threads"].value == "2"
    run(SET="verifier.max-sessions=7 drafter.threads=3")
    assert plans.pop().overrides["drafter"]["threads"].value == "3"


def test_targets_of_flags_variables_and_files(plans: list[LaunchPlan], tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('target = ["a=./A", "b=./B"]\ndrafter = "suffix"')
    for line, variables in (
        (["--target", "a=./A", "--target", "b=./B", "--drafter", "suffix"], {}),
        (["--config", str(file)], {}),
        ([], {"TARGET": "a=./A\nb=./B", "DRAFTER": "suffix"}),
    ):
        result = run(*line, **variables)
        assert isinstance(result.exception, Reached), result.output
        assert [(each.name, each.model, each.drafters) for each in plans.pop().targets] == [
            ("a", "./A", (("suffix", ""),)),
            ("b", "./B", (("suffix", ""),)),
        ]
    run(TARGET="./a folder")
    assert plans.pop().target == "./a folder"


@pytest.mark.parametrize("flag", ["--verifiers", "--drafters", "--coordinators"])
def test_a_number_of_services_beyond_any_machine_is_refused(plans: list[LaunchPlan], flag: str) -> None:
    result = run(flag, "99999999999")
    assert result.exit_code == 2
    assert "less than or equal to 1024" in " ".join(result.output.replace("│", " ").split())
    assert not plans


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("htp-port = 1", "htp-port is not a flag of `up`; did you mean http-port"),
        ("verifer = 1", "verifer is not a flag of `up`; did you mean verifier"),
        ("verifier = 3", "verifier is not a flag of `up`; did you mean verifiers?"),
        ("set = 1", "set is not a flag of `up`"),
    ],
)
def test_an_unknown_name_in_the_file_is_refused(
    plans: list[LaunchPlan], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    result = run("--config", str(file))
    assert isinstance(result.exception, StartupError)
    assert message in result.exception.message
    assert not plans


@pytest.mark.timeout(10)
def test_a_pipe_as_the_file_is_refused(plans: list[LaunchPlan], tmp_path: Path) -> None:
    """It is read twice: the tables of services came from an empty file."""
    os.mkfifo(pipe := tmp_path / "pipe")
    result = run("--config", str(pipe))
    assert isinstance(result.exception, StartupError)
    assert f"--config: cannot read {pipe}: a pipe can be read only once" in result.exception.message
    assert not plans


def test_a_wrong_value_in_the_file_names_the_flag(plans: list[LaunchPlan], tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text("verifiers = 0")
    result = run("--config", str(file))
    assert result.exit_code == 2
    assert "--verifiers" in result.output
    assert not plans


@pytest.mark.parametrize(
    ("line", "gpu", "together"),
    [
        ([], False, True),
        ([], True, False),
        (["--device", "cpu", "--drafter-device", "cpu"], True, True),
        (["--device", "cuda:0"], False, False),
        (["--drafter-apart"], False, False),
        (["--set", "drafter.suffix-factor=3"], False, False),
        (["--set", "verifier.drain-s=3"], False, True),
        (["--engine", "mock"], False, False),
    ],
)
def test_a_drafter_is_in_its_verifiers_process_where_both_share_a_cpu(
    plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch, line: list[str], gpu: bool, together: bool
) -> None:
    monkeypatch.setattr("outrider.launch.services._GPUS", ("/proc/self",) if gpu else ("/missing",))
    assert isinstance(run(*line).exception, Reached)
    assert plans.pop().together is together


def test_a_variable_of_a_service_is_told(plans: list[LaunchPlan]) -> None:
    result = run(GAMMA_MAX="3", HTTP_PORT="9001")
    assert "OUTRIDER_GAMMA_MAX is not read here: --set coordinator.gamma-max=..." in result.output
    assert "HTTP_PORT" not in result.output
    assert plans


@pytest.mark.parametrize(
    ("plan", "flags"),
    [
        (LaunchPlan(), ""),
        (LaunchPlan(tls=True, tls_cert="c", tls_ca="/x/ca.pem", tls_name="localhost"), " --tls-ca /x/ca.pem"),
        (LaunchPlan(tls_cert="c", tls_name="a.example.com"), " --tls-ca system --tls-name a.example.com"),
    ],
)
def test_the_example_shows_how_to_trust(plan: LaunchPlan, flags: str) -> None:
    assert up._tls_flags(plan) == flags


@pytest.mark.parametrize(
    ("host", "listening", "called"),
    [("fd00::1", "[fd00::1]", "[fd00::1]"), ("0.0.0.0", "0.0.0.0", "127.0.0.1"), ("::", "[::]", "127.0.0.1")],
)
def test_addresses_are_told_whole_and_as_callers_write_them(
    host: str, listening: str, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address may look like a mark of the display's own, and be one that no certificate names."""
    authority = Authority.make(tmp_path)
    mine = authority.issue("mine")
    folder = tmp_path / "a folder whose path is longer than the terminal is wide"
    starts_at_once(monkeypatch, listening, folder)
    monkeypatch.setenv("COLUMNS", "40")
    certified = ["--tls-cert", str(mine.cert), "--tls-key", str(mine.key), "--tls-ca", str(authority.path)]
    result = CliRunner().invoke(app, ["up", "--host", host, "--insecure", "--drafter", "suffix", *certified])
    assert result.exit_code == 0, result.output
    assert f"gRPC at {listening}:50050  logs in {folder}\n" in result.output
    assert f"playground at https://{called}:8000, OpenAI API at https://{called}:8000/v1\n" in result.output
    assert f"outrider generate --endpoint {shlex.quote(called + ':50050')} --tls-ca {authority.path} " in result.output


def starts_at_once(monkeypatch: pytest.MonkeyPatch, listening: str, folder: Path) -> None:
    """Let `up` find its services running at an address, and end."""

    @contextlib.contextmanager
    def started(plan: LaunchPlan, *_: object) -> Iterator[Stack]:
        running = Stack(with_certificate(plan), "", folder)
        running.children.append(Child("coordinator-1", [], folder / "log", {}, address=f"{listening}:50050"))
        running.children[0].http_address = f"{listening}:8000"
        yield running

    monkeypatch.setattr(up, "stack", started)
    monkeypatch.setattr(up, "watch", lambda *_: None)
    monkeypatch.setattr(up, "end_on_signals", lambda: None)
    monkeypatch.setattr(up, "set_up_logs", lambda *_, **__: None)


@pytest.mark.parametrize("on_path", [True, False])
def test_the_line_to_try_works_as_it_is_printed(on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make up` no path leads to the command."""
    starts_at_once(monkeypatch, "127.0.0.1", tmp_path)
    (tmp_path / "outrider").write_text("#!/bin/sh\n")
    (tmp_path / "outrider").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path if on_path else tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a folder" / "python"))
    result = CliRunner().invoke(app, ["up", "--drafter", "suffix"])
    command = "outrider" if on_path else f"'{tmp_path / 'a folder' / 'outrider'}'"
    line = f'try: {command} generate --endpoint 127.0.0.1:50050 "The capital of France is"'
    assert f"{line}\nCtrl-C stops\n" in result.output.replace(" \n", " ")


def test_a_port_that_there_is_not_starts_nothing(plans: list[LaunchPlan], tmp_path: Path) -> None:
    """Not even the folder of its state."""
    result = CliRunner().invoke(app, ["up", "--port", "65536", "--state-dir", str(tmp_path / "state")])
    assert result.exit_code == 2
    assert "65535" in result.output
    assert not (tmp_path / "state").exists()
    assert not plans


@pytest.mark.parametrize(
    "line", ["up --log-level loud", "up --threads -3", "bench engine --target missing --threads -3"]
)
def test_a_value_that_there_is_not_starts_nothing(plans: list[LaunchPlan], line: str) -> None:
    """The first one ended with a traceback, before the services' settings were checked; the last one while it ran."""
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert "Invalid value for" in result.output
    assert not plans


@pytest.mark.parametrize("number", ["0", "-4"])
def test_a_demo_of_no_tokens_starts_nothing(plans: list[LaunchPlan], number: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--max-tokens", number])
    assert isinstance(result.exception, InvalidRequest)
    assert f"max_tokens is {number}" in result.exception.message
    assert not plans


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "xterm"), (True, "dumb")])
def test_a_stage_is_shown_as_the_service_told_it(terminal: bool, term: str, tmp_path: Path) -> None:
    """Its text may hold brackets, as tokens do, which are marks of the display's own. A simple terminal has lines."""
    output = io.StringIO()
    child = Child("drafter-1", [], tmp_path / "log", {}, state="not registered: first at token id 3: '[/INST]'")
    child.address = "[fd00::1]:50052"
    running = Stack(LaunchPlan(), "", tmp_path)
    running.children.append(child)
    with up.Starting(Console(file=output, force_terminal=terminal, width=100, _environ={"TERM": term})) as view:
        view.tick(running)
    assert child.state in output.getvalue()
    assert child.address in output.getvalue()


_ON_A_FULL_DISK = """
import contextlib, os, signal, sys
import redis
from outrider.cli import app, up
from outrider.runtime.embedded_redis import embedded_redis
from tests.cluster import until

def pid(url):
    with contextlib.suppress(redis.ConnectionError), redis.Redis.from_url(url) as asking:
        return asking.info("server")["process_id"]

@contextlib.contextmanager
def stack(plan, tick):
    with embedded_redis() as url:
        os.kill(first := pid(url), signal.SIGKILL)
        until(lambda: pid(url) not in (None, first), 20, "another Redis")
    raise SystemExit(7)
    yield

up.stack = stack
sys.argv = ["outrider", "up", "--engine", "mock"]
app.main()
"""


def test_redis_is_started_again_where_no_line_can_be_written() -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    variables["PYTHONUNBUFFERED"] = "1"  # else what is left unwritten fails at the interpreter's end, with status 120
    with open("/dev/full", "wb") as full:
        line = [sys.executable, "-c", _ON_A_FULL_DISK]
        done = subprocess.run(line, stdout=full, stderr=full, env=variables, cwd=ROOT, check=False)
    assert done.returncode == 7
