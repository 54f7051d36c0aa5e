"""Which functions one draft → verify → commit round runs, measured over the three services as processes.

A coordinator, a verifier and a drafter with engines that hold no model serve one session over gRPC: greedy, γ = 4, with
a draft wait timeout that never ends first. So each round drafts four tokens, checks them and commits five. Measured are
`ROUNDS` such rounds one after the other; those before the drafter has joined are plain and do not count. There is no
Redis: it is written to behind the rounds, once for several of them, and how often depends on its speed.

A function belongs to a round if it runs in nearly every one: at least `NEARLY` times a round on average, and in at
least `NEARLY` of all stretches of `STRETCH` rounds. Stretches, because what happens between two rounds falls into
either.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider import TokenKind
from outrider.settings.verifier import VerifierSettings
from tests.cluster import Cluster, Process, ask, client, until
from tests.shape.sources import product

ROUNDS = 48
STRETCH = 4
NEARLY = 0.9
GAMMA = 4
_COMMIT = "coordinator/sessions/drafting.py Drafting.commit"  # ends a round; what the client gets may come in bursts
_WHOLE_ROUND = [TokenKind.ACCEPTED] * GAMMA + [TokenKind.BONUS]
_STAND_INS = ("mock", "instant")  # names that the engine and the drafter without a model have had
_NEVER_US = 10_000_000
_LONG = 50_000  # tokens; the session is cancelled before
_SESSION_S = 120.0
_WRITE_S = 60.0


@dataclass(frozen=True)
class Trace:
    """When the functions of one process ran."""

    functions: Sequence[str]  # "path qualified.name"
    runs: Sequence[tuple[int, int]]  # time in ns, index of the function


@dataclass(frozen=True)
class Rounds:
    """The functions of a round by process."""

    by_process: Mapping[str, Sequence[str]]

    @property
    def functions(self) -> list[str]:
        return sorted({name for names in self.by_process.values() for name in names})

    @property
    def files(self) -> list[str]:
        return sorted({name.partition(" ")[0] for name in self.functions})


def steady(trace: Trace, edges: Sequence[int]) -> list[str]:
    """Return the functions that run in nearly every round; `edges` are the times at which rounds end."""
    rounds = len(edges) - 1
    stretches = edges[::STRETCH]
    counts: Counter[int] = Counter()
    seen: dict[int, set[int]] = defaultdict(set)
    for at, function in trace.runs:
        if edges[0] < at <= edges[-1]:
            counts[function] += 1
            seen[function].add(bisect_left(stretches, at))
    whole = range(1, len(stretches))
    return sorted(
        trace.functions[function]
        for function, count in counts.items()
        if count >= NEARLY * rounds and len(seen[function].intersection(whole)) >= NEARLY * len(whole)
    )


def measure() -> Rounds:
    """Run the services and return what a round runs. Raises RuntimeError if the rounds are not alike."""
    with tempfile.TemporaryDirectory(prefix="outrider-shape-") as folder:
        cluster = _Profiled(Path(folder))
        cluster.add_coordinator()
        cluster.add_verifier(Path("unused"), "--engine", _engine())
        cluster.add_drafter(_drafter())
        try:
            cluster.start()
            cluster.begin()
            whole_until = asyncio.run(_session(cluster.address))
            traces = cluster.end()
        finally:
            cluster.stop()
    edges = [at for at in _times(traces["coordinator-0"], _COMMIT) if at <= whole_until][-ROUNDS:]
    if len(edges) < ROUNDS:
        raise RuntimeError(f"{_COMMIT} ran {len(edges)} times in {ROUNDS} rounds: it should run once in each")
    return Rounds({name: steady(trace, edges) for name, trace in traces.items()})


def _engine() -> str:
    """Return the name of the verifier's engine without a model."""
    allowed = str(VerifierSettings.model_fields["engine"].metadata)
    return next(name for name in _STAND_INS if name in allowed)


def _drafter() -> str:
    """Return the name of the drafter that matches it."""
    texts = [source.text for source in product()]
    return next(name for name in _STAND_INS if any(f'@drafter("{name}")' in text for text in texts))


def _times(trace: Trace, function: str) -> list[int]:
    return [at for at, number in trace.runs if trace.functions[number] == function]


async def _session(address: str) -> int:
    """Return when a client had got `ROUNDS` whole rounds, one after the other."""
    request = ask([1, 2, 3], gamma=GAMMA, patience_us=_NEVER_US, temperature=0.0, max_tokens=_LONG, ignore_eos=True)
    rounds = 0
    async with client(address) as stub:
        call = stub.Generate(request, timeout=_SESSION_S)
        async for reply in call:
            if reply.WhichOneof("message") == "chunk":
                whole = [TokenKind(kind) for kind in reply.chunk.kinds] == _WHOLE_ROUND
                # Rounds before the drafter has joined are plain; two at once are no single round.
                rounds = rounds + 1 if whole else 0
            if rounds > ROUNDS:
                call.cancel()
                return time.monotonic_ns()
    raise RuntimeError(f"the stream ended without {ROUNDS} whole rounds one after the other")


class _Profiled(Cluster):
    """A cluster whose processes record what they run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, redis=False)
        self._files: dict[str, Path] = {}

    def _add(self, group: list[Process], module: str, *flags: str) -> Process:
        process = super()._add(group, module, *flags)
        self._files[process.name] = self.folder / f"{process.name}.json"
        process.run_with("tests.shape.profiled", str(self._files[process.name]))
        return process

    def begin(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGUSR1)

    def end(self) -> dict[str, Trace]:
        for process in self.processes:
            process.signal(signal.SIGUSR2)
        until(lambda: all(file.exists() for file in self._files.values()), _WRITE_S, "the records are written")
        return {name: Trace(**json.loads(file.read_text())) for name, file in self._files.items()}
