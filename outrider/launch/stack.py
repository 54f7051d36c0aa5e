"""A whole Outrider as real processes on this machine: started, watched, restarted, stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.base.config import PREFIX, redis_url
from outrider.base.processes import end_with_parent
from outrider.client.sync import Client
from outrider.launch.state import StateFolder, state_folder
from outrider.protocol.errors import PeerLost, StartupError, Unavailable
from outrider.runtime.embedded_redis import embedded_redis
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels

_READY = "progress: ready at "
_HTTP = "progress: http at "
_PROGRESS = "progress: "
_STOP_S = 15.0
_RESTART_S = 1.0
_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What to start."""

    target: str = "default"
    drafters: tuple[tuple[str, str], ...] = (("ngram", ""),)  # kind and model
    verifiers: int = 1
    coordinators: int = 1
    host: str = "127.0.0.1"
    insecure: bool = False  # though others can reach the host and there are no API keys
    port: int = 50050
    http_port: int = -1  # of the first coordinator; 0: any free one, -1: none
    device: str = "auto"
    drafter_device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    kv_tokens: int = 65_536
    engine: str = "transformers"
    quantization: str = "none"
    compile: str = "auto"
    log_level: str = "info"
    log_json: bool = False
    api_keys: str = field(default="", repr=False)
    open_metrics: bool = False  # /metrics needs no API key
    fleet_key: str = field(default="", repr=False)  # empty: one that nobody else knows
    drafter_key: str = field(default="", repr=False)  # empty: made up as well, unless a fleet key is given
    otlp_endpoint: str = ""
    keep: bool = False  # sessions for the next run
    state_dir: str = ""  # where, if so; empty: the folder of this port


@dataclass(slots=True)
class Child:
    """One process. `state` is what it last said of itself."""

    name: str
    command: list[str]
    log: Path
    secrets: dict[str, str] = field(repr=False)  # variables of its own: everybody may read its command line
    state: str = "starting"
    address: str = ""
    http_address: str = ""
    restarts: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[str] | None = None

    def last_words(self) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


class Stack:
    """`children` change as processes speak; whoever shows them polls."""

    def __init__(self, plan: LaunchPlan, redis: str, folder: Path, state: StateFolder | None = None) -> None:
        self.plan = plan
        self.folder = folder
        self.state = state
        self.children: list[Child] = []
        self._redis = redis
        self._api_key = ApiKeys.parse(plan.api_keys, "api_keys").first
        self._fleet_key = plan.fleet_key or secrets.token_urlsafe(32)
        # Who gave only one key has drafters elsewhere that know no other.
        self._drafter_key = plan.drafter_key or ("" if plan.fleet_key else secrets.token_urlsafe(32))
        self.fleet_access = Channels(key=ApiKeys.parse(self._fleet_key, "fleet_key").first)

    @property
    def endpoints(self) -> list[str]:
        return [child.address for child in self.children if child.name.startswith("coordinator")]

    @property
    def web(self) -> str:
        """Where the first coordinator's HTTP API and playground are."""
        return f"http://{self.children[0].http_address}"

    def start_coordinators(self) -> None:
        for i in range(self.plan.coordinators):
            port = self.plan.port + i if self.plan.port else 0
            http_port = self.plan.http_port + i if self.plan.http_port > 0 else self.plan.http_port
            flags = ["--host", self.plan.host, "--port", str(port), "--http-port", str(http_port)]
            flags += ["--insecure"] if self.plan.insecure else []
            flags += ["--open-metrics"] if self.plan.open_metrics else []
            self._spawn(f"coordinator-{i + 1}", "coordinator", flags, redis=self._redis)

    def start_workers(self) -> None:
        coordinators = ["--coordinators", ",".join(self.endpoints)]
        common = [*coordinators, "--dtype", self.plan.dtype, "--threads", str(self.plan.threads)]
        for i in range(self.plan.verifiers):
            flags = [
                "--target",
                self.plan.target,
                "--engine",
                self.plan.engine,
                "--kv-tokens",
                str(self.plan.kv_tokens),
                "--quantization",
                self.plan.quantization,
                "--compile",
                self.plan.compile,
            ]
            self._spawn(f"verifier-{i + 1}", "verifier", [*common, *flags, "--device", self.plan.device])
        for i, (kind, model) in enumerate(self.plan.drafters):
            flags = ["--kind", kind, "--model", model, "--target", self.plan.target]
            flags += ["--device", self.plan.drafter_device]
            self._spawn(f"drafter-{i + 1}", "drafter", [*common, *flags])

    def wait_ready(self, children: Sequence[Child], tick: Callable[[], None] = lambda: None) -> None:
        """Until all of them serve; raises StartupError with the last words of one that died."""
        while not all(child.ready.is_set() for child in children):
            self._raise_for_dead(children)
            tick()
            time.sleep(0.05)

    def wait_registered(self, tick: Callable[[], None] = lambda: None) -> None:
        """Until the coordinator knows every worker."""
        wanted = self.plan.verifiers + len(self.plan.drafters)
        with Client(self.endpoints[:1], api_key=self._api_key) as client:
            while True:
                self._raise_for_dead(self.children)
                with contextlib.suppress(PeerLost, Unavailable):  # it is starting
                    if len(client.server().workers) >= wanted:
                        return
                tick()
                time.sleep(0.1)

    def revive(self) -> list[Child]:
        """Start again what has died; which those were."""
        dead = [child for child in self.children if child.process is not None and child.process.poll() is not None]
        for child in dead:
            child.restarts += 1
            child.state = f"died with status {child.process.returncode if child.process else '?'}, starting again"
            self._launch(child)
        return dead

    def stop(self) -> None:
        """Send SIGTERM to all processes at once, and SIGKILL to those that have not ended in time.

        A second Ctrl-C does not wait.
        """
        running = [child.process for child in self.children if child.process and child.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        try:
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()

    def _raise_for_dead(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.process is not None and child.process.poll() is not None:
                raise StartupError(f"{child.name} ended with status {child.process.returncode}:\n{child.last_words()}")

    def _spawn(self, name: str, module: str, flags: list[str], redis: str = "") -> None:
        logging = ["--log-level", self.plan.log_level, "--log-json" if self.plan.log_json else "--no-log-json"]
        command = [sys.executable, "-m", module, *flags, *logging]
        child = Child(name, command, self.folder / f"{name}.log", self._secrets(module, redis))
        self.children.append(child)
        self._launch(child)

    def _secrets(self, module: str, redis: str) -> dict[str, str]:
        """What this service needs to know and no other: keys, and addresses that may have a password in them."""
        given = {"OUTRIDER_OTLP_ENDPOINT": self.plan.otlp_endpoint, "OUTRIDER_FLEET_KEY": self._fleet_key}
        if module == "coordinator":
            given |= {"OUTRIDER_API_KEYS": self.plan.api_keys, "REDIS_URL": redis}
        if module != "verifier":
            given["OUTRIDER_DRAFTER_KEY"] = self._drafter_key
        if module == "drafter" and self._drafter_key:
            del given["OUTRIDER_FLEET_KEY"]
        return {name: value for name, value in given.items() if value}

    def _launch(self, child: Child) -> None:
        child.ready.clear()
        # Our own variables would be read by the services a second time: they get flags.
        # REDIS_URL may have a password in it, which is for coordinators.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name == "OUTRIDER_HOME" or not (name.startswith(PREFIX) or name == "REDIS_URL")
        }
        with child.log.open("a") as log:
            child.process = subprocess.Popen(
                child.command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | child.secrets,
                start_new_session=True,  # Ctrl-C reaches us alone: we stop them in order
                preexec_fn=end_with_parent,
            )
        threading.Thread(target=self._listen, args=(child, child.process), daemon=True).start()

    def _listen(self, child: Child, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_READY):
                child.address = line.removeprefix(_READY).strip()
                child.state = "ready"
                child.command = _with_port(child.command, "--port", child.address)
                child.ready.set()
            elif line.startswith(_HTTP):
                child.http_address = line.removeprefix(_HTTP).strip()
                child.command = _with_port(child.command, "--http-port", child.http_address)
            elif line.startswith(_PROGRESS):
                child.state = line.removeprefix(_PROGRESS).strip()


@contextlib.contextmanager
def stack(plan: LaunchPlan, tick: Callable[[Stack], None] = lambda _: None) -> Iterator[Stack]:
    """Start everything, yield when it is ready, stop everything."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        # A random port is nobody's: what is kept under it would be some other run's.
        state = exits.enter_context(state_folder(plan.state_dir, plan.port if plan.keep else 0))
        redis = redis_url() or exits.enter_context(
            embedded_redis(state.data if state.kept else None, holding=[state.lock])
        )
        running = Stack(_with_keys(plan, state), redis, folder, state)
        exits.callback(running.stop)
        running.start_coordinators()
        running.wait_ready(running.children, lambda: tick(running))
        running.start_workers()
        running.wait_ready(running.children, lambda: tick(running))
        running.wait_registered(lambda: tick(running))
        tick(running)
        yield running


def _with_keys(plan: LaunchPlan, state: StateFolder) -> LaunchPlan:
    """Services of a fleet always show each other keys; those that are made up lie where the same user finds them."""
    if plan.fleet_key:
        return plan
    given = plan.drafter_key or f"@{state.key('drafter-key')}"
    return replace(plan, fleet_key=f"@{state.key('fleet-key')}", drafter_key=given)


def watch(running: Stack, say: Callable[[str], None]) -> None:
    """Keep everything alive until interrupted."""
    while True:
        time.sleep(_RESTART_S)
        for child in running.revive():
            say(f"{child.name} {child.state}")


def _with_port(command: list[str], flag: str, address: str) -> list[str]:
    """A restarted service comes back in the same place."""
    port = address.rpartition(":")[2]
    if flag in command:
        at = command.index(flag) + 1
        return [*command[:at], port, *command[at + 1 :]]
    return [*command, flag, port]
