"""Targets of these tests: one vLLM per module, and Outrider's own engine on the same weights.

vLLM's runner is chosen by a variable before vLLM is imported, so one run of pytest tests one runner:
with VLLM_USE_V2_MODEL_RUNNER=1 the newer. The newer one runs on a CPU through Triton's interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest

RUNNER = "v2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "v1"
# Tests that no runner is part of; some of vLLM's models cannot be imported under Triton's interpreter.
_WITHOUT_RUNNER = ["test_published.py", "test_trained_*.py", "test_bench_serve.py"]
_ONLY_V2 = ["test_dspark_accept_length.py"]
_IGNORED = {"v1": _ONLY_V2, "v2": _WITHOUT_RUNNER}
collect_ignore_glob = _IGNORED[RUNNER] if find_spec("vllm") else ["test_*.py"]
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # shapes, not 1,024: their 60 MB look like a leak
if RUNNER == "v2":
    os.environ["TRITON_INTERPRET"] = "1"
    driver = types.SimpleNamespace(is_active=lambda: True)
    import_module("triton.backends").backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    _interpreter = import_module("triton.runtime.interpreter")

    @functools.cache
    def _builtins(package: Any) -> list[tuple[str, Any]]:
        return [each for each in inspect.getmembers(package) if _interpreter.tl.core.is_builtin(each[1])]

    def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """Look for them once; in each call of a function in a kernel it took a fourth of the interpreter's time."""
        for name, member in _builtins(package):
            if getattr(package, name) is member:
                _interpreter._patch_attr(package, name, member, builder, scope)

    _interpreter._patch_builtin = _patch_builtin

from outrider.engine.loading.loader import load_model  # noqa: E402
from outrider.engine.loading.options import EngineOptions  # noqa: E402
from outrider.engine.vllm.core import CoreOptions  # noqa: E402
from outrider.engine.vllm.loading import LoadedCore, load_core  # noqa: E402
from outrider.observability.metrics import VerifierMetrics  # noqa: E402
from outrider.protocol.hidden_states.messages import StateSpecs  # noqa: E402
from outrider.protocol.sampling_params import SamplingParams  # noqa: E402
from outrider.protocol.speculation import WHOLE, Distribution, FinishReason, Guess, Verdict  # noqa: E402
from outrider.settings.verifier import VerifierSettings  # noqa: E402
from outrider.speculation.grammar import GrammarCompiler  # noqa: E402
from outrider.testing.toy_models import make_model  # noqa: E402
from verifier.engine_target import EngineTarget  # noqa: E402
from verifier.loop import VerificationLoop  # noqa: E402
from verifier.session import Ended, Rejection, VerifyOpening  # noqa: E402
from verifier.target import VerifyTarget  # noqa: E402
from verifier.vllm_target import VllmTarget  # noqa: E402

MAX_GUESSES = 6
VOCAB = 257


@pytest.fixture(scope="session")
def crash() -> int:
    """Return a file that make shows after a crash. It stays open, for libraries crash after the last test, too."""
    return os.open(Path(sys.prefix) / f"crash-{RUNNER}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


@pytest.fixture(autouse=True)
def frames_of_a_crash(crash: int, request: pytest.FixtureRequest) -> None:
    """Take crashes back from a library of vLLM's, whose report lacks Python's frames and goes where pytest captures."""
    os.ftruncate(crash, 0)
    os.pwrite(crash, f"crashed in or after {request.node.nodeid}\n".encode(), 0)
    os.lseek(crash, 0, os.SEEK_END)
    faulthandler.disable()
    faulthandler.enable(crash, all_threads=False)


@pytest.fixture(scope="session", autouse=True)
def models_looked_at_here() -> None:
    """Where vLLM meets a class of models for the first time, it starts a process that imports vLLM and looks at it."""
    import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda look: look()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy Llama with heads wide enough for vLLM."""
    return make_model(
        tmp_path_factory.mktemp("models") / "target", seed=7, hidden=128, context=1024, sharpness=4.0, focus=0.1
    )


def options(**more: object) -> CoreOptions:
    given = {"kv_tokens": 8192, "more": "--enforce-eager --block-size 32"} | more
    return CoreOptions(
        model=Path(), dtype="float32", max_guesses=MAX_GUESSES, max_sessions=16, max_prompt_tokens=64, **given
    )


@pytest.fixture(scope="module")
def process_groups() -> Iterator[None]:
    """Leave no process groups to the engines of other modules."""
    yield
    gc.collect()  # what is left of the modules that use them
    distributed = import_module("vllm.distributed")
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


@contextlib.contextmanager
def vllm_target(model: Path, **more: object) -> Iterator[tuple[VllmTarget, LoadedCore]]:
    loaded = load_core(str(model), options(**more), lambda stage: None)
    # vLLM 0.32 registers its kernels anew with each core, and fails at it once numba is loaded.
    type(import_module("vllm.platforms").current_platform).register_triton_kernel_overrides = lambda *_: None
    target = VllmTarget(loaded.core, loaded.info)
    yield target, loaded
    target.close()
    gc.collect()  # its garbage is not freed beside the next one


@pytest.fixture(scope="module")
def vllm(model: Path) -> Iterator[VllmTarget]:
    with vllm_target(model) as (target, _):
        yield target


@pytest.fixture(scope="module")
def own(model: Path) -> Iterator[EngineTarget]:
    target = EngineTarget(load_model(str(model), EngineOptions(engine="transformers")).engine)
    yield target
    target.close()


@pytest.fixture(scope="session")
def grammars(model: Path) -> GrammarCompiler:
    return GrammarCompiler(lambda: (model / "tokenizer.json").read_text(), (256,))


@dataclass
class Request:
    """One session to run, and what came of it."""

    name: str
    prompt: list[int]
    params: SamplingParams
    gamma: int = 0
    hidden_states: bool = False
    states: StateSpecs | None = None
    salt: str = ""
    draft_wait_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return sum(verdict.accepted for verdict in self.verdicts)


# Guesses after these output tokens of a request.
Drafter = Callable[[Request], Sequence[int]]
NOTHING: Drafter = lambda request: ()  # noqa: E731


def loop_over(target: VerifyTarget, *, kv_tokens: int = 8192, max_sessions: int = 16) -> VerificationLoop:
    limits = VerifierSettings(
        max_sessions=max_sessions,
        max_waiting=128,
        kv_tokens=kv_tokens,
        prefill_rows=64,
        prefill_stretch=1.6,
        guess_rows=MAX_GUESSES,
    )
    return VerificationLoop(target, limits, VerifierMetrics("test"))


async def run(
    loop: VerificationLoop,
    requests: Sequence[Request],
    drafter: Drafter = NOTHING,
    grammars: GrammarCompiler | None = None,
) -> list[list[int]]:
    """Run all requests at once to their ends; return their texts."""
    running = asyncio.create_task(loop.run())
    try:
        await asyncio.wait_for(
            asyncio.gather(*(_follow(loop, request, drafter, grammars) for request in requests)), 120
        )
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        idle = Event()  # a step goes on without its loop, and the next test steps the same core
        loop.thread.submit(idle.set)
        idle.wait()
    return [request.tokens for request in requests]


async def _follow(loop: VerificationLoop, request: Request, drafter: Drafter, grammars: GrammarCompiler | None) -> None:
    opening = VerifyOpening(
        request.name,
        1,
        tuple(request.prompt),
        len(request.prompt),
        request.params,
        hidden_states=request.hidden_states,
        cache_salt=request.salt,
    )
    guide = None
    if request.params.grammar is not None:
        assert grammars is not None
        guide = await grammars.compile_async(request.params)
    session = loop.open(opening, guide)
    if request.states is not None:
        session.hidden_states.steer(others=request.states)
    session.gamma, session.draft_wait_s = request.gamma, request.draft_wait_s
    first_id = 1
    while True:
        reply = await session.outbox.get()
        if isinstance(reply, Ended):
            if reply.error is not None:
                raise reply.error
            return
        assert not isinstance(reply, Rejection), reply.error
        request.tokens += reply.tokens
        request.verdicts.append(reply)
        guesses = tuple(drafter(request))
        if guesses and reply.finish_reason is FinishReason.NONE:
            needed = request.params.mode.needs_draft_probs
            probs = tuple(Distribution((token,), (WHOLE,)) for token in guesses) if needed else ()
            session.add_guess(Guess(len(session.committed), first_id, 0, guesses, probs))
            first_id += len(guesses)
            loop.wake()
