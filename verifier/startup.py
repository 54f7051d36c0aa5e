"""The start of a verifier from its settings: the engine, the service, and the ranks of a model in several processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from outrider.base.config import flags
from outrider.base.logs import set_up_logs
from outrider.base.openmp import use_threads
from outrider.engine.loading.options import EngineOptions
from outrider.engine.mock import MockEngine
from outrider.engine.tensor_parallel import RankGroup, join_ranks, run_follower
from outrider.engine.throttled import ThrottledEngine, parse_pace
from outrider.engine.vllm.core import node_rank
from outrider.models.drafter_choice import choose_drafter
from outrider.models.tokenizer import save_tokenizer
from outrider.observability.tracing import Tracing, make_tracing
from outrider.protocol.errors import StartupError
from outrider.runtime.together import Together
from outrider.runtime.worker import run_worker
from outrider.settings.verifier import VerifierSettings
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService
from verifier.vllm_target import VllmTarget, follow, runs_on_vllm, vllm_options

if TYPE_CHECKING:
    from outrider.engine.loading.loader import LoadedModel

log = structlog.get_logger(__name__)


def build(
    settings: VerifierSettings, scratch: Path, progress: Callable[[str], None], rank_group: RankGroup | None
) -> VerifierService:
    tracing = make_tracing(settings.otlp_endpoint, "verifier")
    if settings.engine == "mock":
        log.warning("mock engine selected: no model, for measuring overhead only")
        mock = MockEngine()
        engine = ThrottledEngine(mock, parse_pace(settings.pace)) if settings.pace else mock
        files = mock.save_tokenizer(scratch)
        return VerifierService(EngineTarget(engine), mock.vocabulary, files, settings, tracing=tracing)
    if runs_on_vllm(settings):
        return build_on_vllm(settings, scratch, progress, tracing)
    loaded = load(settings, progress, rank_group)
    files = save_tokenizer(loaded.tokenizer, scratch)
    fitted = settings.model_copy(update={"kv_tokens": settings.kv_tokens or loaded.engine.capacity_tokens})
    return VerifierService(EngineTarget(loaded.engine), loaded.vocabulary, files, fitted, loaded.cost, tracing)


def load(settings: VerifierSettings, progress: Callable[[str], None], rank_group: RankGroup | None) -> LoadedModel:
    from outrider.engine.loading.loader import load_model  # here: it loads transformers, which a mock does not need

    return load_model(settings.target, EngineOptions.of(settings), progress, rank_group)


def build_on_vllm(
    settings: VerifierSettings, scratch: Path, progress: Callable[[str], None], tracing: Tracing
) -> VerifierService:
    from outrider.engine.vllm.loading import load_core  # here: it loads transformers

    loaded = load_core(settings.target, vllm_options(settings), progress)
    files, target = save_tokenizer(loaded.tokenizer, scratch), VllmTarget(loaded.core, loaded.info)
    fitted = settings.model_copy(update={"kv_tokens": loaded.core.capacity_tokens})
    return VerifierService(target, loaded.vocabulary, files, fitted, loaded.cost, tracing)


def serve(settings: VerifierSettings, rank_group: RankGroup | None = None) -> None:
    use_threads(settings.threads)
    run_worker("verifier", settings, lambda progress: _build_all(settings, progress, rank_group))


def _build_all(
    settings: VerifierSettings, progress: Callable[[str], None], rank_group: RankGroup | None
) -> VerifierService | Together:
    """Build the verifier, and its own drafter if the settings name one."""
    if settings.own_drafter:
        choose_drafter(settings.own_drafter, settings.target)  # a wrong one is told before a model is loaded
        if settings.metrics_port == 65535:
            raise StartupError.of("metrics_port", 65535, "at most 65534: its own drafter has the next port")
    with tempfile.TemporaryDirectory(prefix="outrider-verifier-") as scratch:  # not longer: a killed process leaves it
        service = build(settings, Path(scratch), progress, rank_group)
    if not settings.own_drafter:
        return service
    (found,) = entry_points(group="outrider.own_drafter")
    drafter = found.load()(settings, settings.own_drafter, settings.target, service.loop, progress)
    return Together(service, drafter, service.auth_interceptor.joined(drafter.auth_interceptor))


def run(settings: VerifierSettings) -> None:
    rank = node_rank(settings.vllm_args)
    if rank and runs_on_vllm(settings):
        follow(settings, rank)
        return
    if settings.tensor_parallel == 1 or runs_on_vllm(settings):
        serve(settings)
        return
    set_up_logs(settings.log_level, as_json=settings.log_json, service="verifier")
    command = [sys.executable, *["-P"] * sys.flags.safe_path, "-m", "verifier", *flags(settings)]
    with join_ranks(settings.tensor_parallel, settings, command) as rank_group:
        if rank_group.is_leader:
            serve(settings, rank_group)
        else:
            run_follower(load(settings, lambda _: None, rank_group).engine, rank_group)
