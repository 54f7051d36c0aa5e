"""Other engines with the same weights, each in a process of its own (`peer.py`), asked one prompt at a time."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from outrider.bench.drafters.comparison import Contestant, Question, TimedAnswer
from outrider.protocol.errors import Expired, PeerLost, StartupError

_WORKER = Path(__file__).with_name("peer.py")
_START_S = 900.0  # vLLM compiles
_ANSWER_S = 600.0
_STOP_S = 10.0
_SETTLE_S = 0.25  # OpenMP's threads spin for so long after their work: not on the next contestant's time


@dataclass(frozen=True, slots=True)
class PeerRecipe:
    """What to start, and the ways to decode that it has."""

    engine: str
    python: Path
    ways: Mapping[str, str]  # as shown → as asked for
    spec: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weights:
    """What all of them are to load."""

    model: str
    dtype: str
    device: str
    threads: int
    context: int  # tokens, prompt and answer together
    eos: tuple[int, ...]


def transformers_recipe(weights: Weights, early_exit: int | None) -> PeerRecipe:
    ways = {"generate": "plain", "prompt lookup": "lookup", "early exit": "early_exit"}
    spec = {
        "engine": "transformers",
        "model": weights.model,
        "dtype": weights.dtype,
        "device": weights.device,
        "threads": weights.threads,
        "early_exit": early_exit,
    }
    return PeerRecipe("transformers", Path(sys.executable), ways, spec)


def vllm_recipes(weights: Weights, python: Path) -> list[PeerRecipe]:
    """An engine for each way: vLLM settles it at its start."""
    spec = {"engine": "vllm", "model": weights.model, "dtype": weights.dtype, "context": weights.context}
    environment = vllm_environment(python, weights)
    return [
        PeerRecipe("vllm", python, {shown: way}, {**spec, "way": way}, environment)
        for shown, way in (("generate", "plain"), ("n-gram", "ngram"))
    ]


def vllm_environment(python: Path, weights: Weights) -> dict[str, str]:
    """What vLLM's documentation asks for on CPUs. What the user has set stays."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if Path(weights.model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if weights.device.startswith("cpu"):
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "2"
        if weights.threads:  # in one process VLLM_CPU_OMP_THREADS_BIND does nothing
            wanted["OMP_NUM_THREADS"] = str(weights.threads)
        libraries = _libraries(python)
        if libraries:
            wanted["LD_PRELOAD"] = ":".join(map(str, libraries))
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _libraries(python: Path) -> list[Path]:
    """Its OpenMP beside the interpreter, and tcmalloc there or where distributions put it."""
    beside = python.absolute().parent.parent / "lib"
    found = [beside / "libiomp5.so"]
    for folder in (beside, *sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")):
        allocators = sorted(folder.glob("libtcmalloc_minimal.so*"))
        if allocators:
            found.append(allocators[0])
            break
    return [library for library in found if library.is_file()]


class Peer:
    """One process. It ends when its pipe does."""

    def __init__(self, recipe: PeerRecipe, weights: Weights, log: IO[str]) -> None:
        self.recipe = recipe
        self.about: dict[str, Any] = {}
        self._weights = weights
        self._log = log
        self._process = subprocess.Popen(
            [str(recipe.python), str(_WORKER), json.dumps(dict(recipe.spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Run as a file, its folder would come first on the path, and our modules in the place of others'.
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

    def contestants(self) -> list[Contestant]:
        return [Contestant(self.recipe.engine, shown) for shown in self.recipe.ways]

    def ask(self, shown: str, question: Question) -> TimedAnswer:
        """Its answer, or in its place why it has none."""
        asked = {
            "way": self.recipe.ways[shown],
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "eos": self._weights.eos,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(json.dumps(asked) + "\n")
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
        """One line. There is never more than one on its way, so that none waits in a buffer that select cannot see."""
        pipe = self._process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            raise Expired(f"{self.recipe.engine} has not answered within {seconds:g} s")
        line = pipe.readline()
        if not line:
            raise PeerLost(f"{self.recipe.engine} ended with status {self._process.wait()}: {self._last_words()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _last_words(self) -> str:
        lines = [line for line in Path(self._log.name).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"


@contextlib.contextmanager
def peers(recipes: Sequence[PeerRecipe], weights: Weights) -> Iterator[list[Peer]]:
    """Start them one by one: loading takes memory and all cores."""
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
