"""What `outrider up` starts, from its plan."""

from __future__ import annotations

import errno
import itertools
import resource
import shutil
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.launch.services import ServiceSpec, read_assignments
from outrider.launch.stack import (
    Child,
    LaunchPlan,
    Stack,
    coordinators,
    refuse_equal_targets,
    stack,
    watch,
    with_certificate,
    with_generated_keys,
    workers,
)
from outrider.launch.targets import TargetPlan
from outrider.protocol.errors import Expired, StartupError
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.settings.verifier import VerifierSettings
from tests.certificates import Authority, Certificate
from tests.cluster import until

PLAN = LaunchPlan(target="big", drafters=(("model", "small"), ("ngram", "")), verifiers=2, coordinators=2, http_port=80)


def found(specs: list[ServiceSpec], *names: str) -> list[tuple[object, ...]]:
    return [(spec.name, *(getattr(spec.settings, name) for name in names)) for spec in specs]


def test_further_coordinators_take_the_next_ports() -> None:
    assert found(coordinators(PLAN, "redis://x"), "port", "http_port", "redis_url") == [
        ("coordinator-1", 50050, 80, "redis://x"),
        ("coordinator-2", 50051, 81, "redis://x"),
    ]
    free = replace(PLAN, port=0, http_port=-1)
    assert found(coordinators(free, ""), "port", "http_port") == [("coordinator-1", 0, -1), ("coordinator-2", 0, -1)]


@pytest.mark.parametrize("given", [False, True])
def test_metrics_are_opened_where_that_is_asked_for(given: bool) -> None:
    made = coordinators(replace(PLAN, open_metrics=given), "")
    assert [("--open-metrics" in spec.command) for spec in made] == [given] * 2


def test_workers_know_their_coordinators_and_models() -> None:
    made = workers(replace(PLAN, device="cuda", drafter_device="cpu", kv_tokens=4096), ["a:1", "b:2"])
    verifiers, drafters = made[:2], made[2:]
    assert found(verifiers, "coordinators", "target", "device", "kv_tokens") == [
        (f"verifier-{i}", "a:1,b:2", "big", "cuda", 4096) for i in (1, 2)
    ]
    assert found(drafters, "coordinators", "target", "device", "kind", "model") == [
        ("drafter-1", "a:1,b:2", "big", "cpu", "model", "small"),
        ("drafter-2", "a:1,b:2", "big", "cpu", "ngram", ""),
    ]


def test_a_verifier_has_its_targets_first_drafter_if_they_are_together() -> None:
    plan = with_generated_keys(replace(PLAN, together=True))
    *verifiers, drafter = workers(plan, ["a:1"])
    assert found(verifiers, "own_drafter") == [("verifier-1", "model:small"), ("verifier-2", "model:small")]
    assert found([drafter], "kind") == [("drafter-1", "ngram")]
    assert all(each.settings.drafter_key for each in verifiers), "for the registration of their drafters"
    assert all(not each.settings.own_drafter for each in workers(PLAN, ["a:1"])[:2])


def test_each_service_has_the_keys_that_it_needs() -> None:
    def variables(plan: LaunchPlan) -> list[set[str]]:
        made = [*coordinators(plan, ""), *workers(plan, [])]
        kinds = {spec.kind: {name.removeprefix("OUTRIDER_") for name in spec.variables} for spec in made}
        return [kinds[kind] for kind in ("coordinator", "verifier", "drafter")]

    both = [{"API_KEYS", "FLEET_KEY", "DRAFTER_KEY"}, {"FLEET_KEY"}, {"DRAFTER_KEY"}]
    assert variables(with_generated_keys(replace(PLAN, api_keys="k"))) == both
    one = [{"API_KEYS", "FLEET_KEY"}, {"FLEET_KEY"}, {"FLEET_KEY"}]
    assert variables(with_generated_keys(replace(PLAN, api_keys="k", fleet_key="f"))) == one


def test_settings_go_before_the_flags_of_up() -> None:
    plan = replace(PLAN, device="cuda", overrides=read_assignments(["verifier-2.device=cpu", "drafter.threads=3"]))
    assert found(workers(plan, []), "device", "threads") == [
        ("verifier-1", "cuda", 0),
        ("verifier-2", "cpu", 0),
        ("drafter-1", "auto", 3),
        ("drafter-2", "auto", 3),
    ]


@pytest.mark.parametrize(
    ("hosts", "name"),
    [(["a.example.com"], "a.example.com"), (["*.example.com"], "outrider.example.com"), ([], "127.0.0.1")],
)
def test_services_go_by_a_name_in_their_certificate(tmp_path: Path, hosts: list[str], name: str) -> None:
    authority = Authority.make(tmp_path)
    plan = with_certificate(certified(authority.issue("mine", hosts=hosts), authority))
    made = [*coordinators(plan, ""), *workers(plan, [])]
    assert {spec.settings.tls_name for spec in made} == {name}
    assert {spec.settings.tls_cert for spec in made} == {str(tmp_path / "mine.pem")}


def certified(mine: Certificate, authority: Authority) -> LaunchPlan:
    return replace(PLAN, tls_cert=str(mine.cert), tls_key=str(mine.key), tls_ca=str(authority.path))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (LaunchPlan(host="0.0.0.0"), "there are no keys"),
        (LaunchPlan(quantization="int3"), "verifier-1.quantization is 'int3'"),
        (LaunchPlan(overrides=read_assignments(["coordinator.max-sessions=0"])), "coordinator-1.max-sessions is '0'"),
        (LaunchPlan(tls=True, tls_ca="x"), "--tls makes a certificate"),
        (LaunchPlan(tls_ca="/missing"), "tls_ca: cannot read /missing"),
        (LaunchPlan(tls_ca="system"), "this service would listen in plain text"),
        (LaunchPlan(port=50050, http_port=50050), "is the port of"),
        (LaunchPlan(target="/no/model"), "there is no model at /no/model"),
        (LaunchPlan(target=str(Path(__file__).parent)), "holds no config.json"),
        (LaunchPlan(others=(TargetPlan("./nothing.gguf", "b"),)), "there is no model at ./nothing.gguf"),
        (LaunchPlan(device="gpu"), "verifier-1.device is 'gpu'"),
        (LaunchPlan(drafter_device="cuda:x"), "drafter-1.device is 'cuda:x'"),
        (LaunchPlan(device="cuda:7"), "device is cuda:7, must be auto or cpu for verifier-1: this machine has no GPU"),
        (LaunchPlan(dtype="x"), "verifier-1.dtype is 'x'"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    plan: LaunchPlan, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("outrider.launch.services._GPUS", ("/missing",))
    monkeypatch.setattr("outrider.launch.stack.embedded_redis", started)
    monkeypatch.setattr("outrider.launch.stack.subprocess.Popen", started)
    monkeypatch.delenv("REDIS_URL", raising=False)
    with pytest.raises(StartupError, match=message), stack(replace(plan, keep=False)):
        pass


def test_waits_for_its_own_workers_not_for_those_of_a_stack_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator remembers these until they have been silent for long."""
    mine, behind_a_link, dead = (SimpleNamespace(address=f"this-machine:{port}") for port in (1001, 1002, 1003))
    known = iter([[dead, dead], [], [dead, dead, mine], [dead, mine, behind_a_link]])

    class Coordinator(ExitStack):
        def server(self) -> SimpleNamespace:
            if workers := next(known):
                return SimpleNamespace(workers=workers)
            raise Expired("the machine was busy for ten seconds")

    monkeypatch.setattr("outrider.launch.stack.Client", lambda *_, **__: Coordinator())
    started = Stack(replace(PLAN, port=0), "", tmp_path)
    started.children = [
        Child("verifier-1", [], tmp_path / "a.log", {}, address="0.0.0.0:1001"),
        Child("drafter-1", ["--advertise", "link:1002 "], tmp_path / "b.log", {}, address="127.0.0.1:1004"),
    ]
    assert list(started.wait_workers("127.0.0.1:5", 2, lambda _: None)) == [mine, behind_a_link]


@pytest.mark.parametrize("starting", [True, False], ids=["while its target loads", "with all others there"])
def test_a_worker_that_fits_nothing_is_told(starting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be awaited for ever; a drafter of a target that loads is refused only until that is there."""
    here = SimpleNamespace(address="here:1001")
    asked = itertools.count()

    class Coordinator(ExitStack):
        def server(self) -> SimpleNamespace:
            return SimpleNamespace(workers=[here] * (3 if starting and next(asked) > 3 else 1))

    monkeypatch.setattr("outrider.launch.stack.Client", lambda *_, **__: Coordinator())
    monkeypatch.setattr("outrider.launch.stack._FIT_S", 0.15)
    started = Stack(replace(PLAN, port=0), "", tmp_path)
    started.children = [
        Child("verifier-1", [], tmp_path / "a.log", {}, address="here:1001"),
        Child("drafter-1", [], tmp_path / "b.log", {}, address="here:1002", state="not registered: another vocabulary"),
    ]
    if starting:
        assert len(started.wait_workers("127.0.0.1:5", 3, lambda _: None)) == 3
    else:
        with pytest.raises(StartupError, match="drafter-1 is not registered: another vocabulary"):
            started.wait_workers("127.0.0.1:5", 2, lambda _: None)


def test_a_verifier_that_fits_nothing_is_told_as_is_its_own_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = ExitStack()
    coordinator.server = lambda: SimpleNamespace(workers=[])  # type: ignore[attr-defined]
    monkeypatch.setattr("outrider.launch.stack.Client", lambda *_, **__: coordinator)
    monkeypatch.setattr("outrider.launch.stack._FIT_S", 0.15)
    started = Stack(replace(PLAN, port=0), "", tmp_path)
    spec = ServiceSpec("verifier-1", "verifier", VerifierSettings(own_drafter="eagle"))
    state = "not registered: another target"
    started.children = [Child(spec.name, spec.command, tmp_path / "a.log", {}, address="here:1001", state=state)]
    with pytest.raises(StartupError, match="verifier-1 is not registered: another target"):
        started.wait_workers("127.0.0.1:5", 2, lambda _: None)


def verifier(name: str, text: str) -> WorkerInfo:
    return WorkerInfo(worker_id=name, role=Role.VERIFIER, address="a:1", model=ModelInfo(name, text))


def test_targets_of_equal_weights_are_refused() -> None:
    """The coordinator takes the second one's verifiers for the first one's, and knows no second name."""
    refuse_equal_targets([verifier("a", "x"), verifier("a", "x"), verifier("b", "y")])
    with pytest.raises(StartupError, match="target is b, must be of other weights than a"):
        refuse_equal_targets([verifier("a", "x"), verifier("c", "y"), verifier("b", "x")])


def test_the_output_of_a_process_that_ended_is_closed(tmp_path: Path) -> None:
    started = Stack(replace(PLAN, port=0), "", tmp_path)
    child = Child("a", [sys.executable, "-c", "print('x')"], tmp_path / "a.log", {})
    started._launch(child)
    process = child.process
    assert process is not None
    assert process.stdout is not None
    process.wait()
    output = process.stdout
    until(lambda: output.closed, 5, "its output to be closed")


def test_the_last_line_of_a_service_that_fails_is_told_however_long_those_before_are(tmp_path: Path) -> None:
    """A traceback ends with the cause. The lines of its frames can fill an error alone."""
    running = Stack(PLAN, "", tmp_path)
    code = "raise SystemExit('│ frame\\n' * 9 + '│ frame' * 300 + '\\nImportError: the cause')"
    running.children.append(child := Child("a", [sys.executable, "-c", code], tmp_path / "a.log", {}))
    running._launch(child)
    assert child.process is not None
    child.process.wait(timeout=30)
    with pytest.raises(StartupError) as failed:
        running._raise_for_dead()
    assert failed.value.message.startswith("a ended with status 1:\n")
    assert failed.value.message.endswith("│ frame\nImportError: the cause")


def test_a_stage_that_is_not_utf_8_is_no_obstacle(tmp_path: Path) -> None:
    """Such as the path of a model from a machine with another locale."""
    output = b"progress: loading /models/gr\xfcn\nprogress: ready at 127.0.0.1:5\n"
    child = Child("a", [sys.executable, "-c", f"import os; os.write(1, {output!r})"], tmp_path / "a.log", {})
    Stack(replace(PLAN, port=0), "", tmp_path)._launch(child)
    assert child.ready.wait(10)
    assert child.process is not None
    child.process.wait()


def test_a_log_of_weeks_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in /tmp, which may be memory, and a service writes a line for each request."""
    monkeypatch.setattr("outrider.launch.stack._LOG_BYTES", 1000)
    log, go_on = tmp_path / "a.log", tmp_path / "go on"
    code = (
        "import pathlib, sys, time\nprint('first' * 400, end='', file=sys.stderr, flush=True)\n"
        "print('progress: ready at x:1', flush=True)\n"
        f"while not pathlib.Path({str(go_on)!r}).exists():\n time.sleep(0.02)\nsys.stderr.write('second')"
    )
    running = Stack(replace(PLAN, port=0), "", tmp_path)
    child = Child("a", [sys.executable, "-c", code], log, {})
    running.children += [child, Child("b", [], tmp_path / "gone", {})]
    running._launch(child)
    assert child.ready.wait(20)
    running.shorten_logs()
    assert not log.read_text()
    assert log.with_suffix(".log.1").read_text() == "first" * 400
    go_on.touch()
    assert child.process is not None
    child.process.wait()
    running.shorten_logs()
    assert log.read_text() == "second"


def test_a_full_disk_keeps_no_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was copied again each second, and stayed as long as it was."""
    monkeypatch.setattr("outrider.launch.stack._LOG_BYTES", 1000)
    running = Stack(replace(PLAN, port=0), "", tmp_path)
    running.children.append(Child("a", [], log := tmp_path / "a.log", {}))
    log.write_text("long" * 400)
    log.with_suffix(".log.1").write_text("of before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (800, limits[1]))
        running.shorten_logs()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not log.read_text()
    assert log.with_suffix(".log.1").read_text() == "long" * 200


def test_a_service_that_dies_again_and_again_is_started_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may load a model each time, on the cores of those that run."""
    running = Stack(replace(PLAN, port=0), "", tmp_path)
    running.children.append(child := Child("a", [sys.executable, "-c", ""], tmp_path / "a.log", {}))
    running._launch(child)
    now, started = 5.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    for _ in range(120):
        assert child.process is not None
        child.process.wait()
        started += [now] * len(running.restart_dead())
        now += 1
    assert started == [5, 6, 8, 12, 20, 35, 50, 65, 80, 95, 110]
    now += 50
    child.process.wait()
    assert running.restart_dead(), "it has run for a minute"
    assert child.pause_s == 1
    child.process.wait()


def test_a_restart_for_which_there_is_no_memory_is_tried_again(tmp_path: Path) -> None:
    running = Stack(replace(PLAN, port=0), "", tmp_path)
    running.children.append(child := Child("a", [sys.executable, "-c", ""], tmp_path / "a.log", {}))
    running._launch(child)
    assert child.process is not None
    child.process.wait()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = child.process
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        assert running.restart_dead() == [child]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert child.process is first
    until(running.restart_dead, 10, "another try")
    assert child.process is not first
    child.process.wait()


def test_a_restart_for_which_there_is_no_thread_ends_no_other_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Stack(replace(PLAN, port=0), "", tmp_path)
    running.children.append(child := Child("a", [sys.executable, "-c", ""], tmp_path / "a.log", {}))
    running._launch(child)
    assert child.process is not None
    child.process.wait()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(child, "command", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert running.restart_dead() == [child]
    unheard = child.process
    unheard.communicate(timeout=10)
    monkeypatch.undo()
    until(running.restart_dead, 10, "another try")
    assert child.process is not unheard
    child.process.kill()
    child.process.wait()


def test_a_service_that_dies_after_its_folder_was_cleaned_away_is_started_again(tmp_path: Path) -> None:
    """Systems remove from /tmp what was not written to for days."""
    folder = tmp_path / "outrider-x"
    folder.mkdir()
    running = Stack(replace(PLAN, port=0), "", folder)
    child = Child("a", [sys.executable, "-c", ""], folder / "a.log", {})
    running.children.append(child)
    running._launch(child)
    assert child.process is not None
    child.process.wait()
    shutil.rmtree(folder)
    assert running.restart_dead() == [child]
    running.stop()


def test_what_another_user_put_in_place_of_the_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the system has removed it from /tmp, its name is free, and a link there may lead to any of our files."""
    monkeypatch.setattr("outrider.launch.stack._LOG_BYTES", 1000)
    ours, folder = tmp_path / "ours", tmp_path / "outrider-x"
    ours.write_text("x" * 4000)
    folder.mkdir()
    (folder / "a.log").symlink_to(ours)
    running = Stack(replace(PLAN, port=0), "", folder)
    running.children.append(child := Child("a", [sys.executable, "-c", ""], folder / "a.log", {}))
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    running.shorten_logs()
    with pytest.raises(StartupError, match="belongs to another user"):
        running._launch(child)
    assert ours.read_text() == "x" * 4000


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SystemExit(1)])
def test_a_line_that_cannot_be_written_ends_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a closed pipe, for which Rich exits, is no reason to end the services that run."""
    monkeypatch.setattr("outrider.launch.stack._RESTART_S", 0.1)
    running = Stack(replace(PLAN, port=0), "", tmp_path)
    running.children.append(Child("a", [sys.executable, "-c", ""], tmp_path / "a.log", {}))
    running._launch(running.children[0])
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        raise error if len(lines) < 2 else KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            watch(running, report)
    finally:
        running.stop()
    assert lines == ["a died with status 0, restarting"] * 2


@pytest.mark.parametrize(("drain_s", "status"), [(5.0, 7), (0.0, -signal.SIGKILL)])
def test_stopping_waits_for_the_longest_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_s: float, status: int
) -> None:
    monkeypatch.setattr("outrider.launch.stack._STOP_S", 0.2)
    drains = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)));"
    started = Stack(replace(PLAN, port=0), "", tmp_path)
    child = Child(
        "a",
        [sys.executable, "-c", f"{drains} print('progress: ready at x:1', flush=True); time.sleep(60)"],
        tmp_path / "a",
        {},
    )
    child.drain_s = drain_s
    started.children.append(child)
    started._launch(child)
    assert child.ready.wait(20)
    started.stop()
    assert child.process is not None
    assert child.process.returncode == status
