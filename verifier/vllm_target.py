"""The target on vLLM, which caches and computes; the draws and the acceptance in its workers are Outrider's.

Here are also the settings with which vLLM runs the model, and the processes of a machine that serves no target itself.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch

from outrider.base.config import KV_TOKENS
from outrider.base.logs import set_up_logs
from outrider.engine import StepResult
from outrider.engine.loading.options import pick_device, pick_dtype
from outrider.engine.vllm.compatibility import check_installed, installed_version
from outrider.engine.vllm.core import CoreOptions, VllmCore, run_ranks
from outrider.engine.vllm.messages import Computed, Opening, PlannedSession
from outrider.models.hub import locate_safetensors
from outrider.protocol.errors import InvalidRequest, OutriderError, PeerLost, StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.settings.verifier import VerifierSettings
from outrider.speculation.grammar import Masks
from verifier.batching import ScheduledSession
from verifier.engine_target import MASK_THREADS
from verifier.hidden_states.projections import Projections
from verifier.hidden_states.step_states import KeptRows, SentRows, wire_states
from verifier.session import VerifySession
from verifier.target import SessionResult, TargetFailed, VerifyStep

log = structlog.get_logger(__name__)


class VllmTarget:
    """A VerifyTarget on vLLM's engine core."""

    verifies_trees = False  # vLLM has no attention over trees
    device = torch.device("cpu")  # of the sampling state of sessions: the workers have their own

    def __init__(self, core: VllmCore, info: ModelInfo) -> None:
        self._core = core
        self._info = info
        self.projections = Projections(core.state_shape, core.state_device, core.layers)
        self._known: set[str] = set()
        self._mask_threads = ThreadPoolExecutor(max_workers=MASK_THREADS, thread_name_prefix="masks")

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def block_tokens(self) -> int:
        return self._core.block_tokens

    @property
    def evictable_tokens(self) -> int:
        return self._core.evictable_tokens

    def match_prefix(self, session: VerifySession, at_most: int) -> None:
        """Leave the lookup to vLLM, which does it in the session's first step."""
        self._core.scheduler.at_most_cached[session.key] = at_most

    def step(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        started = time.perf_counter()
        masks = _ChainMasks(self._mask_threads, batch, self._info.vocab_size)
        try:
            for item in batch:
                self._begin(item.session)
            self._core.step({item.session.key: _planned(item) for item in batch}, masks)
            masks.finish()
        except Exception as error:  # vLLM's state is unknown after it
            raise TargetFailed(f"vLLM failed: {type(error).__name__}: {error}") from error
        forward = time.perf_counter()
        results = [self._result(item, masks, sent) for item, sent in zip(batch, self._sent(batch), strict=True)]
        return VerifyStep(results, int((forward - started) * 1e6), int((time.perf_counter() - started) * 1e6))

    def free(self, session: VerifySession) -> None:
        for tokens in (self._core.scheduler.at_most_cached, self._core.scheduler.cached_prefix):
            tokens.pop(session.key, None)
        if session.key in self._known:
            self._known.remove(session.key)
            self._core.abort([session.key])

    def close(self) -> None:
        self._mask_threads.shutdown(wait=True)
        self._core.close()

    def _begin(self, session: VerifySession) -> None:
        if session.key not in self._known:
            self._known.add(session.key)
            opening = Opening(session.params, session.prompt_length)
            self._core.add(session.key, session.committed, opening, session.cache_salt)

    def _sent(self, batch: Sequence[ScheduledSession]) -> list[SentRows]:
        """Return the hidden states that each session sends."""
        found = [self._core.scheduler.computed.get(item.session.key, Computed()).hidden_states for item in batch]
        rows = [torch.empty(0) if states is None else states for states in found]
        kept = [KeptRows(it.states if len(row) else (), range(len(row))) for it, row in zip(batch, rows, strict=True)]
        return wire_states(StepResult(torch.empty(0), (), rows, self._core.layers), kept, self.projections.find)

    def _result(self, item: ScheduledSession, masks: _ChainMasks, sent: SentRows) -> SessionResult:
        session, scheduler = item.session, self._core.scheduler
        cache_length = self._core.num_computed(session.key)
        num_cached_tokens = scheduler.cached_prefix.pop(session.key, None)
        computed: Computed = scheduler.computed.get(session.key, Computed())
        if cache_length is None:  # vLLM ends a request at the end of its context
            if computed.verified is None:
                return SessionResult(None, {}, 0, error=PeerLost("vLLM has ended the session"))
            cache_length = len(session.committed) + len(computed.verified.outcome.path)
        error: OutriderError | None = masks.errors.get(session.key)
        if error is None and computed.error:
            log.error("verification failed, session ended", session=session.id, error=computed.error)
            error = PeerLost(f"verification failed: {computed.error}")
        if error is not None:
            return SessionResult(None, {}, cache_length, error=error)
        complete_after = None
        if computed.verified is not None and session.guide is not None:
            try:
                complete_after = session.guide.advance(computed.verified.tokens)
            except InvalidRequest as failure:
                return SessionResult(None, {}, cache_length, error=failure)
        return SessionResult(computed.verified, sent, cache_length, num_cached_tokens, complete_after)


def _planned(item: ScheduledSession) -> PlannedSession:
    block, session = item.block, item.session
    hidden_from = session.cache_length if item.states else None
    return PlannedSession(item.num_tokens, block.tokens, block.draft_probs, hidden_from)


class _ChainMasks:
    """The tokens that grammars allow in one step, computed by threads during the forward pass."""

    def __init__(self, threads: ThreadPoolExecutor, batch: Sequence[ScheduledSession], vocab_size: int) -> None:
        self.errors: dict[str, InvalidRequest] = {}
        self._started: dict[str, Future[Masks]] = {}
        self._later: dict[str, Callable[[], Masks]] = {}  # of prompt chunks, of which few need one
        for item in batch:
            if item.session.guide is None:
                continue
            compute = partial(item.session.guide.allowed, item.block.paths, vocab_size)
            if item.verifies:
                self._started[item.session.key] = threads.submit(compute)
            else:
                self._later[item.session.key] = compute

    def __call__(self, request: str, guesses: Sequence[int]) -> Masks | None:
        """Return the masks of the rows that vLLM computes: it may have cut guesses.  # [1 + guesses, vocab]"""
        started, later = self._started.pop(request, None), self._later.get(request)
        try:
            if started is not None:
                return started.result()[: 1 + len(guesses)]
            # A chunk reaches the prompt's end after all where vLLM has found its beginning in the cache.
            return None if later is None else later()[: 1 + len(guesses)]
        except InvalidRequest as error:  # the other sessions are not affected
            self.errors[request] = error
            return None

    def finish(self) -> None:
        """Wait for the masks that vLLM did not ask for: a matcher serves one thread at a time."""
        wait(self._started.values())


def runs_on_vllm(settings: VerifierSettings) -> bool:
    """Return whether vLLM runs the model; raise StartupError for its settings without it."""
    engine = settings.engine
    if engine == "vllm":
        return True
    device = pick_device(settings.device, engine)
    if engine == "auto" and device.type == "cuda" and installed_version() is not None:
        log.info("engine vllm selected, as vLLM is installed", device=str(device), version=installed_version())
        return True
    for name in ("pipeline_parallel", "gpu_memory", "max_model_len", "vllm_args", "state_layers"):
        value, default = getattr(settings, name), VerifierSettings.model_fields[name].default
        if value != default:
            message = f"--{name.replace('_', '-')} needs --engine vllm"
            raise StartupError(message, field=name, value=value, limit=f"{default!r} here")
    return False


def follow(settings: VerifierSettings, rank: int) -> None:
    """Run this machine's processes of a model whose verifier is on another machine."""
    set_up_logs(settings.log_level, as_json=settings.log_json, service="verifier")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = vllm_options(settings)  # refused before a download
    options = replace(options, model=Path(locate_safetensors(settings.target, log.info)))
    log.info("running processes of a verifier on another machine", node_rank=rank)
    run_ranks(options)
    log.error("a process of the model ended, so this machine's end too", node_rank=rank)
    sys.exit(1)


def vllm_options(settings: VerifierSettings) -> CoreOptions:
    """Return the options of vLLM. Raises StartupError for settings that it does not take."""
    check_installed()
    if settings.quantization == "int8":
        raise StartupError("int8 is a format of engine native", field="quantization", value="int8", limit="none or fp8")
    if settings.pipeline_parallel > 1:
        message = "pipeline parallelism does not work on vLLM yet: use --tensor-parallel, also over several machines"
        raise StartupError(message, field="pipeline_parallel", value=settings.pipeline_parallel, limit="1")
    device = pick_device(settings.device)
    return CoreOptions(
        dtype=str(pick_dtype(settings.dtype, device)).removeprefix("torch."),
        max_guesses=settings.guess_rows,
        max_sessions=settings.max_sessions,
        max_prompt_tokens=settings.prefill_rows,
        # On a GPU the cache takes the memory that is free, unless a size is given.
        kv_tokens=settings.kv_tokens or (KV_TOKENS if device.type == "cpu" else None),
        tensor_parallel=settings.tensor_parallel,
        quantization="" if settings.quantization == "none" else settings.quantization,
        gpu_memory_share=settings.gpu_memory,
        max_model_len=settings.max_model_len,
        layers=_layers(settings.state_layers),
        more=settings.vllm_args,
    )


def _layers(given: str) -> tuple[int, ...]:
    layers = {layer.strip() for layer in given.split(",")} - {""}
    if not all(layer.isascii() and layer.isdigit() and int(layer) > 0 for layer in layers):
        raise StartupError("no layers", field="state_layers", value=given, limit="numbers from 1 on, as in 2,14,27")
    return tuple(sorted({int(layer) for layer in layers}))
