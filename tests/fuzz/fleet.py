"""Fleet under fuzzing: real processes with toy models, a neighbour client, and checks of both at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.testing.toy_models import make_model
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.cluster import (
    ROOT,
    Cluster,
    Process,
    ask,
    drafter_load,
    environment,
    known_workers,
    server_info,
    verifier_load,
)
from tests.fuzz import corpus
from tests.fuzz.corpus import Known

OPEN_TIMEOUT_S = 2.0
SETTLE_S = 10.0
GROWTH_MB = 300.0  # of a process, caches that have a limit included
MAX_LINE = 8_000  # characters of a log line
_BAD = re.compile(
    r"Traceback \(most recent call last\)|was never retrieved|\[critical|request failed +reference"
    r"|Exception (ignored )?in|Unhandled|Fatal Python error|Segmentation|AssertionError"
)
# Log line of gRPC's client for bytes that are not a message.
_KNOWN = re.compile(r"Exception deserializing message!(?s:.*?)\.DecodeError[^\n]*\n")
PACE = "1:15,64:15"
ANSWER_S = 1.0  # time of an answer to the neighbour with throttled engines


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that a process holds."""

    memory_mb: float
    descriptors: int
    threads: int
    cpu_s: float

    @classmethod
    def of(cls, process: Process) -> Footprint:
        folder = Path(f"/proc/{process.pid}")
        threads = len(list((folder / "task").iterdir()))
        ticks = sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
        cpu_s = ticks / os.sysconf("SC_CLK_TCK")
        return cls(round(process.memory_mb(), 1), len(list((folder / "fd").iterdir())), threads, cpu_s)


class Neighbour:
    """Process that repeats the same requests."""

    def __init__(self, address: str, folder: Path) -> None:
        self._path = folder / "neighbour.jsonl"
        self._errors = folder / "neighbour.err"
        self._ended = ""  # why it ended by itself
        with self._path.open("wb") as out, self._errors.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.neighbour", address],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=environment(PYTHONPATH=str(ROOT)),
            )
        deadline = time.monotonic() + 60
        while "ready" not in self._path.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the neighbour did not begin: {self._errors.read_text()[-2000:]}")
            time.sleep(0.05)

    def answers(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines()[1:]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wrong(self) -> list[dict[str, Any]]:
        ended = [{"error": f"the neighbour ended: {self._ended}"}] if self._ended else []
        return ended + [answer for answer in self.answers() if not answer.get("equal")]

    def stop(self) -> None:
        if (status := self._process.poll()) is not None:
            self._ended = f"status {status}, {self._errors.read_text()[-500:]}"
        self._process.terminate()
        self._process.wait(10)


def gap_ms(answers: list[dict[str, Any]], spans: list[tuple[float, float]]) -> float:
    """Return the median time between tokens of the plain answers within these spans."""
    gaps = [
        answer["gap_ms"]
        for answer in answers
        if answer["plain"]
        and "gap_ms" in answer
        and any(start <= answer["at"] < end - ANSWER_S for start, end in spans)
    ]
    return statistics.median(gaps) if gaps else 0.0


class Fleet:
    def __init__(self, folder: Path, *, paced: bool) -> None:
        self.folder = folder
        target = make_model(folder / "target", seed=7, sharpness=4.0, focus=0.1)
        near = make_model(folder / "draft", seed=99, like=target, blur=0.05)
        self.cluster = Cluster(folder / "logs", flags=("--open-timeout-s", str(OPEN_TIMEOUT_S)))
        self.coordinator = self.cluster.add_coordinator("--worker-wait-s", "2", "--session-ttl-s", "60")
        self.verifier = self.cluster.add_verifier(target, *(("--pace", PACE) if paced else ()))
        self.drafter = self.cluster.add_drafter("suffix+model", near)
        self._read: dict[str, int] = {}

    def start(self) -> Known:
        self.cluster.start()
        with self.cluster.access.channel(self.coordinator.address) as channel:
            stub = rpc.OutriderStub(channel)
            target = stub.GetModelInfo(common.GetModelInfoRequest(), timeout=10)
            request = ask(corpus.PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True, gamma=0)
            tokens = [token for reply in stub.Generate(request, timeout=30) for token in reply.chunk.token_ids]
        return Known(target, tuple(tokens))

    def stop(self) -> None:
        self.cluster.stop()

    def address(self, edge: str) -> str:
        return {"verify": self.verifier, "draft": self.drafter}.get(edge, self.coordinator).address

    @property
    def http(self) -> str:
        return self.coordinator.web.removeprefix("http://")

    # Checks.

    def dead(self) -> list[str]:
        return [
            f"{process.name} ended with {process.exit_code}" for process in self.cluster.processes if not process.alive
        ]

    def complaints(self) -> list[str]:
        """Return unexpected new log lines."""
        found = []
        for process in self.cluster.processes:
            with process.log_path.open("rb") as log:
                log.seek(self._read.get(process.name, 0))
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[process.name] = self._read.get(process.name, 0) + len(whole)
            text = _KNOWN.sub("", whole.decode(errors="replace"))
            if (bad := _BAD.search(text)) is not None:
                found.append(f"{process.name} logged: {text[max(0, bad.start() - 300) : bad.start() + 3_000]}")
            longest = max(text.splitlines(), key=len, default="")
            if len(longest) > MAX_LINE:
                found.append(f"{process.name} logged a line of {len(longest)} characters: {longest[:200]}")
        return found

    def log_bytes(self) -> int:
        return sum(process.log_path.stat().st_size for process in self.cluster.processes)

    def footprints(self) -> dict[str, Footprint]:
        return {process.name: Footprint.of(process) for process in self.cluster.processes if process.alive}

    def left_over(self, before: dict[str, Footprint], slack: int = 48) -> list[str]:
        """Return resources still held after a grace period. `slack` allows for pools, which grow with concurrency."""
        deadline = time.monotonic() + SETTLE_S
        while (held := self._held(before, slack)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return held

    def _held(self, before: dict[str, Footprint], slack: int) -> list[str]:
        held = []
        info = server_info(self.coordinator.address)
        if info.sessions:
            held.append(f"{info.sessions} sessions at the coordinator")
        if len(info.workers) != 2:
            held.append(f"workers known: {[worker.worker_id for worker in known_workers(self.coordinator.address)]}")
        load = verifier_load(self.verifier.address)
        if load.sessions or load.waiting or load.kv_tokens_used:
            held.append(
                f"the verifier has {load.sessions} sessions, {load.waiting} waiting, {load.kv_tokens_used} tokens"
            )
        load = drafter_load(self.drafter.address)
        if load.sessions or load.waiting:
            held.append(f"the drafter has {load.sessions} sessions, {load.waiting} waiting")
        for name, now in self.footprints().items():
            if now.descriptors > before[name].descriptors + slack or now.threads > before[name].threads + slack:
                held.append(f"{name}: {before[name]} has become {now}")
            if now.memory_mb > before[name].memory_mb + GROWTH_MB:
                held.append(f"{name} has grown from {before[name].memory_mb} to {now.memory_mb} MB")
        return held


@contextmanager
def running(folder: Path, *, paced: bool) -> Iterator[tuple[Fleet, Known]]:
    fleet = Fleet(folder, paced=paced)
    try:
        yield fleet, fleet.start()
    finally:
        with contextlib.suppress(ProcessLookupError):
            fleet.stop()


def as_dict(footprints: dict[str, Footprint]) -> dict[str, Any]:
    return {name: asdict(footprint) for name, footprint in footprints.items()}
