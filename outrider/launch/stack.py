"""All services as processes on this machine: started, supervised, restarted, stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from outrider.base.config import inherited_environment, redis_url
from outrider.base.processes import ending_with_parent
from outrider.client.sync import Client
from outrider.launch.authority import make_certificate
from outrider.launch.services import Overrides, ServiceSpec, check_services, has_gpu, make_services
from outrider.launch.state import StateFolder, state_folder
from outrider.launch.targets import TargetPlan, worker_settings
from outrider.protocol.errors import Expired, PeerLost, StartupError, Unavailable
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.runtime.embedded_redis import check_redis, embedded_redis
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels
from outrider.security.tls import Tls, certified_names

_READY = "progress: ready at "
_HTTP = "progress: http at "
_PROGRESS = "progress: "
_REFUSED = "not registered: "
_FIT_S = 30.0  # that a refused worker has when all others are there: a coordinator may still forget earlier ones
_STOP_S = 5.0  # after the drain
_RESTART_S, _MAX_RESTART_S = 1.0, 15.0  # between two starts of a service that dies again and again
_LAST_BYTES = 1_200  # of a log: the cause is at its end, and longer errors lose theirs
_LOG_BYTES = 64 << 20  # of a service; as much again is kept of what it wrote before


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Services to start, and their settings."""

    target: str = "default"
    name: str = ""  # of the target for clients; empty: its own
    drafters: tuple[tuple[str, str], ...] = (("ngram", ""),)  # kind and model
    others: tuple[TargetPlan, ...] = ()  # further targets
    verifiers: int = 1
    coordinators: int = 1
    host: str = "127.0.0.1"
    insecure: bool = False  # though others can reach the host and there are no API keys
    port: int = 50050
    http_port: int = -1  # of the first coordinator; 0: any free one, -1: none
    together: bool = False  # a target's first drafter runs in its verifier's process
    device: str = "auto"
    drafter_device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    kv_tokens: int = 65_536
    engine: str = "auto"
    quantization: str = "none"
    log_level: str = "info"
    api_keys: str = field(default="", repr=False)
    open_metrics: bool = False  # /metrics needs no API key
    fleet_key: str = field(default="", repr=False)  # empty: a generated one
    drafter_key: str = field(default="", repr=False)  # empty: a generated one, unless a fleet key is given
    otlp_endpoint: str = ""
    overrides: Overrides = field(default_factory=dict)  # settings of the services; they override those above
    tls: bool = False  # with a generated certificate
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""  # read from the certificate
    keep: bool = False  # sessions for the next run
    state_dir: str = ""  # where, if so; empty: the folder of this port

    @property
    def targets(self) -> tuple[TargetPlan, ...]:
        return TargetPlan(self.target, self.name, self.drafters), *self.others


@dataclass(slots=True)
class Child:
    """One process. `state` is its last reported stage."""

    name: str
    command: list[str]
    log: Path
    secrets: dict[str, str] = field(repr=False)  # as variables: every user can read a command line
    drain_s: float = 0.0
    state: str = "starting"
    address: str = ""
    http_address: str = ""
    ports: dict[str, str] = field(default_factory=dict)  # by flag, which it keeps when it is restarted
    restarted_at: float = float("-inf")  # by the monotonic clock
    pause_s: float = 0.0  # between that and the next restart
    ready: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[str] | None = None


class Stack:
    """Running processes. `children` change as the processes report progress; displays poll them."""

    def __init__(self, plan: LaunchPlan, redis: str, folder: Path, state: StateFolder | None = None) -> None:
        self.plan = with_generated_keys(plan)
        self.folder = folder
        self.state = state
        self.children: list[Child] = []
        self._redis = redis
        tls = Tls.load(cert=plan.tls_cert, key=plan.tls_key, ca=plan.tls_ca, name=plan.tls_name)
        self.access = Channels(tls, ApiKeys.parse(plan.api_keys, "api_keys").first)  # a client's

    @property
    def endpoints(self) -> list[str]:
        return [child.address for child in self.children if child.name.startswith("coordinator")]

    @property
    def web(self) -> str:
        """Return the URL of the first coordinator's HTTP API and playground."""
        return f"{'https' if self.access.tls else 'http'}://{self.children[0].http_address}"

    def start_coordinators(self) -> None:
        for service in coordinators(self.plan, self._redis):
            self._start(service)

    def start_workers(self) -> None:
        for service in workers(self.plan, self.endpoints):
            self._start(service)

    def start(self, tick: Callable[[Stack], None] = lambda _: None) -> None:
        """Start everything. Raise StartupError with the last log lines of a process that died."""
        for start in (self.start_coordinators, self.start_workers):
            start()
            while not all(child.ready.is_set() for child in self.children):
                self._raise_for_dead()
                tick(self)
                time.sleep(0.05)
        self.wait_registered(tick)

    def wait_registered(self, tick: Callable[[Stack], None]) -> None:
        """Wait until every worker is registered."""
        wanted = sum(1 + bool(getattr(each.settings, "own_drafter", "")) for each in workers(self.plan, self.endpoints))
        refuse_equal_targets(self.wait_workers(self.endpoints[0], wanted, tick))

    def wait_workers(self, address: str, wanted: int, tick: Callable[[Stack], None]) -> Sequence[WorkerInfo]:
        """Wait until so many of our workers, not of a stack that died, are registered; return them."""
        words = [word for child in self.children for word in (child.address, *child.command)]  # of --advertise too
        our_ports = {word.rpartition(":")[2].strip() for word in words}  # a worker at 0.0.0.0 registers by its name
        fit_by = time.monotonic() + _FIT_S
        with Client([address], api_key=self.access.key, tls=self.access.tls) as client:
            while True:
                self._raise_for_dead()
                with contextlib.suppress(PeerLost, Unavailable, Expired):  # it is starting, or this machine is busy
                    found = [it for it in client.server().workers if it.address.rpartition(":")[2] in our_ports]
                    if len(found) >= wanted:
                        return found
                    refused = [child for child in self.children if child.state.startswith(_REFUSED)]
                    if len(found) + sum(1 + ("--own-drafter" in each.command) for each in refused) < wanted:
                        fit_by = time.monotonic() + _FIT_S
                    elif time.monotonic() > fit_by:
                        raise StartupError(f"{refused[0].name} is {refused[0].state}")
                tick(self)
                time.sleep(0.1)

    def restart_dead(self) -> list[Child]:
        """Restart dead processes and return them; the pauses of one that dies again and again grow."""
        now = time.monotonic()
        dead = [child for child in self._dead() if now >= child.restarted_at + child.pause_s]
        for child in dead:
            child.state = f"died {_way_of(child.process)}, restarting"
            again = now < child.restarted_at + 4 * _MAX_RESTART_S
            child.pause_s = min(2 * child.pause_s, _MAX_RESTART_S) if again else _RESTART_S
            child.restarted_at = now
            with contextlib.suppress(OSError, RuntimeError):  # no memory, thread or room: again after the pause
                self._launch(child)
        return dead

    def shorten_logs(self) -> None:
        """Begin long logs anew: their services append to them."""
        for child in self.children:
            with contextlib.suppress(OSError):  # a full disk, or the system has removed an old file from /tmp
                # Where the system removed the folder, another user may have made it anew, with links to our files.
                if self.folder.lstat().st_uid == os.getuid() and child.log.stat().st_size > _LOG_BYTES:
                    try:
                        shutil.copyfile(child.log, child.log.with_suffix(".log.1"))
                    finally:  # a full disk keeps the beginning
                        child.log.write_bytes(b"")

    def stop(self) -> None:
        """Send SIGTERM to all at once, and SIGKILL to those that are late; a second Ctrl-C does not wait."""
        running = [child.process for child in self.children if child.process and child.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S + max((child.drain_s for child in self.children), default=0.0)
        try:
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()

    def _raise_for_dead(self) -> None:
        for child in self._dead():
            said = child.log.read_bytes()[-_LAST_BYTES:].decode(errors="ignore").strip()
            raise StartupError(f"{child.name} ended {_way_of(child.process)}:\n{said}")

    def _dead(self) -> list[Child]:
        return [child for child in self.children if child.process is not None and child.process.poll() is not None]

    def _start(self, service: ServiceSpec) -> None:
        log = self.folder / f"{service.name}.log"
        child = Child(service.name, service.command, log, service.variables, service.settings.drain_s)
        self.children.append(child)
        self._launch(child)

    def _launch(self, child: Child) -> None:
        child.ready.clear()
        self.folder.mkdir(mode=0o700, exist_ok=True)  # the system removes old folders in /tmp
        if self.folder.lstat().st_uid != os.getuid():
            raise StartupError(f"{self.folder} belongs to another user now", field="folder", value=str(self.folder))
        # Only coordinators get REDIS_URL, with its password.
        with child.log.open("a") as log:
            child.process = subprocess.Popen(
                [*child.command, *chain(*child.ports.items())],  # the last of two equal flags counts
                stdout=subprocess.PIPE,
                stderr=log,
                errors="replace",
                env=inherited_environment() | child.secrets,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops them in order
                preexec_fn=ending_with_parent(),
            )
        try:
            threading.Thread(target=self._listen, args=(child, child.process), daemon=True).start()
        except RuntimeError:
            child.process.kill()  # unread, it would never be ready
            raise

    def _listen(self, child: Child, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.startswith(_READY):
                    child.address = line.removeprefix(_READY).strip()
                    child.state = "ready"
                    child.ports["--port"] = child.address.rpartition(":")[2]
                    child.ready.set()
                elif line.startswith(_HTTP):
                    child.http_address = line.removeprefix(_HTTP).strip()
                    child.ports["--http-port"] = child.http_address.rpartition(":")[2]
                elif line.startswith(_PROGRESS):
                    child.state = line.removeprefix(_PROGRESS).strip()


@contextlib.contextmanager
def stack(plan: LaunchPlan, tick: Callable[[Stack], None] = lambda _: None) -> Iterator[Stack]:
    """Start everything, yield the stack when it is ready, stop everything."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        # A random port has no state folder: it would belong to another run.
        state = exits.enter_context(state_folder(plan.state_dir, plan.port if plan.keep else 0))
        plan = with_certificate(_with_own(plan, state))
        check_services([*coordinators(plan, ""), *workers(plan, [])])
        kept = state.data if state.kept else None
        redis = redis_url() or exits.enter_context(embedded_redis(kept, holding=[state.lock]))
        check_redis(redis)  # coordinators would start without, and keep nothing
        running = Stack(plan, redis, folder, state)
        exits.callback(running.stop)
        running.start(tick)
        tick(running)
        yield running


def refuse_equal_targets(workers: Sequence[WorkerInfo]) -> None:
    """Raise StartupError for equal weights under two names: the coordinator knows one of them."""
    names: dict[str, str] = {}
    for model in (each.model for each in workers if each.role is Role.VERIFIER):
        if (first := names.setdefault(model.text_id, model.name)) != model.name:
            raise StartupError.of("target", model.name, f"of other weights than {first}", "; see coordinator.alias")


def on_one_cpu(device: str, drafter_device: str, engine: str) -> bool:
    """Return whether verifiers and drafters on these devices share this machine's cores."""
    cpu = {"cpu"} if has_gpu() else {"cpu", "auto"}
    return engine in ("auto", "native", "transformers") and {device, drafter_device} <= cpu


def coordinators(plan: LaunchPlan, redis: str) -> list[ServiceSpec]:
    """Return the coordinators to start, with consecutive ports."""
    own = common_settings(plan, "coordinator") | {"host": plan.host, "insecure": plan.insecure, "redis_url": redis}
    own |= {"api_keys": plan.api_keys, "open_metrics": plan.open_metrics}
    own |= {"default_model": plan.name if plan.others else ""}
    first = {"port": plan.port, "http_port": plan.http_port}
    ports = [{name: port + i if port > 0 else port for name, port in first.items()} for i in range(plan.coordinators)]
    return make_services("coordinator", [own | each for each in ports], plan.overrides)


def workers(plan: LaunchPlan, endpoints: Sequence[str]) -> list[ServiceSpec]:
    """Return the workers to start, for coordinators at `endpoints`."""
    own = {"coordinators": ",".join(endpoints), "dtype": plan.dtype, "threads": plan.threads}
    verifier = own | common_settings(plan, "verifier") | {"device": plan.device, "engine": plan.engine}
    verifier |= {"kv_tokens": plan.kv_tokens, "quantization": plan.quantization}
    drafter = own | common_settings(plan, "drafter") | {"device": plan.drafter_device}
    verifiers, drafters = worker_settings(plan.targets, plan.verifiers, int(plan.together))
    return [
        *make_services("verifier", [verifier | each for each in verifiers], plan.overrides),
        *make_services("drafter", [drafter | each for each in drafters], plan.overrides),
    ]


def common_settings(plan: LaunchPlan, kind: str) -> dict[str, Any]:
    """Return the settings of all services, and the keys that this kind needs."""
    own: dict[str, Any] = {"log_level": plan.log_level, "otlp_endpoint": plan.otlp_endpoint}
    own |= {name: getattr(plan, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_name")}
    if kind != "verifier" or plan.together:
        own["drafter_key"] = plan.drafter_key
    if kind != "drafter" or not plan.drafter_key:
        own["fleet_key"] = plan.fleet_key
    return own


def with_generated_keys(plan: LaunchPlan, key: Callable[[str], str] = lambda _: secrets.token_urlsafe()) -> LaunchPlan:
    """Return a plan with generated keys, unless some are given."""
    if plan.fleet_key:
        return plan  # given alone, it is also the key of drafters on other machines
    return replace(plan, fleet_key=key("fleet-key"), drafter_key=plan.drafter_key or key("drafter-key"))


def with_certificate(plan: LaunchPlan) -> LaunchPlan:
    """Return a plan with a name from its certificate: the services' own addresses may not be in it."""
    Tls.load(cert=plan.tls_cert, key=plan.tls_key, ca=plan.tls_ca)
    if not plan.tls_cert:
        return plan
    names = certified_names(plan.tls_cert, plan.tls_key, plan.tls_ca)
    return replace(plan, tls_name=names[0].replace("*.", "outrider."))


def _with_own(plan: LaunchPlan, state: StateFolder) -> LaunchPlan:
    """Return a plan with keys and certificate in the state folder, unless others are given."""
    if plan.tls:
        if plan.tls_cert or plan.tls_key or plan.tls_ca:
            raise StartupError("--tls makes a certificate: use it, or --tls-cert, --tls-key and --tls-ca", field="tls")
        cert, key, ca = make_certificate(state.folder / "tls", plan.host)
        plan = replace(plan, tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca))
    return with_generated_keys(plan, lambda name: f"@{state.key(name)}")


def watch(running: Stack, report: Callable[[str], None]) -> None:
    """Restart dead processes until interrupted."""
    while True:
        time.sleep(_RESTART_S)
        running.shorten_logs()
        for child in running.restart_dead():
            with contextlib.suppress(OSError, SystemExit):  # rich exits where its output is closed: the others go on
                report(f"{child.name} {child.state}")


def _way_of(process: subprocess.Popen[str] | None) -> str:
    """Return how a process has ended."""
    code = process.returncode if process is not None else 0
    return f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with status {code}"
