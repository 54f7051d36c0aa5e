"""Other engines with the same weights, each in its own process (`peer.py`), which answers one prompt at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from outrider.bench.drafters.comparison import BenchRequest, Candidate, TimedAnswer
from outrider.protocol.errors import Expired, PeerLost, StartupError

_WORKER = Path(__file__).with_name("peer.py")
_START_S = 900.0  # vLLM compiles
_ANSWER_S = 600.0
_STOP_S = 10.0
_SETTLE_S = 0.25  # OpenMP threads spin for about 0.2 s after their work, which would slow the next candidate


@dataclass(frozen=True, slots=True)
class PeerRecipe:
    """Command to start an engine, and its decoding methods."""

    engine: str
    python: Path
    ways: Mapping[str, str]  # displayed name → name in the request
    spec: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that all engines load."""

    model: str
    dtype: str
    device: str
    threads: int
    context: int  # tokens, prompt and answer together
    eos: tuple[int, ...]


def transformers_recipe(weights: Weights, early_exit: int | None) -> PeerRecipe:
    ways = {"generate": "plain", "prompt lookup": "lookup", "early exit": "early_exit"}
    return PeerRecipe("transformers", Path(sys.executable), ways, {**asdict(weights), "early_exit": early_exit})


def vllm_recipes(weights: Weights, python: Path, dtype: str) -> list[PeerRecipe]:
    spec = asdict(replace(weights, dtype=dtype or weights.dtype))
    environment = vllm_environment(python, weights)
    return _one_per_way("vllm", python, {"generate": "plain", "n-gram": "ngram"}, spec, environment)


def llama_recipes(weights: Weights, python: Path, gguf: Path) -> list[PeerRecipe]:
    """Return the engines of llama.cpp, which read the target's own file."""
    spec = asdict(replace(weights, model=str(gguf)))
    return _one_per_way("llama.cpp", python, {"generate": "plain", "prompt lookup": "lookup"}, spec, {})


def _one_per_way(
    engine: str, python: Path, ways: Mapping[str, str], spec: Mapping[str, Any], environment: Mapping[str, str]
) -> list[PeerRecipe]:
    """Return one engine for each decoding method: it is fixed at startup."""
    return [PeerRecipe(engine, python, {shown: way}, {**spec, "way": way}, environment) for shown, way in ways.items()]


def vllm_environment(python: Path, weights: Weights) -> dict[str, str]:
    """Return the variables that vLLM's documentation recommends on CPUs, without those that the user has set."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if Path(weights.model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if weights.device.startswith("cpu"):
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "2"
        if weights.threads:  # VLLM_CPU_OMP_THREADS_BIND has no effect in a single process
            wanted["OMP_NUM_THREADS"] = str(weights.threads)
        libraries = _libraries(python)
        if libraries:
            wanted["LD_PRELOAD"] = ":".join(map(str, libraries))
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _libraries(python: Path) -> list[Path]:
    """Return the interpreter's OpenMP library, and tcmalloc from there or from the system's folders."""
    own = python.absolute().parent.parent / "lib"
    libraries = [own / "libiomp5.so"]
    for folder in (own, *sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")):
        allocators = sorted(folder.glob("libtcmalloc_minimal.so*"))
        if allocators:
            libraries.append(allocators[0])
            break
    return [library for library in libraries if library.is_file()]


class Peer:
    """Process of an engine. It ends when its pipe is closed."""

    def __init__(self, recipe: PeerRecipe, weights: Weights, log: IO[str]) -> None:
        self.recipe = recipe
        self.about: dict[str, Any] = {}
        self._weights = weights
        self._log = log
        self._process = subprocess.Popen(
            [str(recipe.python), str(_WORKER), json.dumps({"engine": recipe.engine, **recipe.spec})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Otherwise the file's folder comes first on the path, and our modules shadow others.
            env={**os.environ, "PYTHONSAFEPATH": "1", **recipe.environment},
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        try:
            self.about = self._read(_START_S)
        except PeerLost as error:
            raise StartupError(error.message) from error
        if "error" in self.about:
            raise StartupError(f"{self.recipe.engine} does not start: {self.about['error']}")

    def candidates(self) -> list[Candidate]:
        return [Candidate(self.recipe.engine, shown) for shown in self.recipe.ways]

    def measure(self, shown: str, request: BenchRequest) -> TimedAnswer:
        """Return the answer with its times, or with the engine's error."""
        message = {
            "way": self.recipe.ways[shown],
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "eos": self._weights.eos,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading raises the cause
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        reply = self._read(_ANSWER_S)
        time.sleep(_SETTLE_S)
        if "error" in reply:
            return TimedAnswer(error=reply["error"])
        return TimedAnswer(tuple(reply["tokens"]), tuple((count, seconds) for count, seconds in reply["times"]))

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self, seconds: float) -> dict[str, Any]:
        """Read one line. At most one is in flight: none can wait in a buffer that select does not see."""
        pipe = self._process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            raise Expired(f"{self.recipe.engine} has not answered within {seconds:g} s")
        line = pipe.readline()
        if not line:
            raise PeerLost(f"{self.recipe.engine} ended with status {self._process.wait()}: {self._last_line()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _last_line(self) -> str:
        lines = [line for line in Path(self._log.name).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "no output"


@contextlib.contextmanager
def peers(recipes: Sequence[PeerRecipe], weights: Weights) -> Iterator[list[Peer]]:
    """Start the engines one by one: loading takes memory and all cores."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-peers-")))
        started = []
        for i, recipe in enumerate(recipes):
            log = exits.enter_context((folder / f"{recipe.engine}-{i}.log").open("w"))
            peer = Peer(recipe, weights, log)
            exits.callback(peer.stop)
            peer.wait_ready()
            started.append(peer)
        yield started
