"""`python -m verifier`: run the verifier service."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog

from outrider.base.config import flags, main
from outrider.base.logs import set_up_logs
from outrider.base.openmp import use_threads
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.mock import MockEngine
from outrider.engine.tensor_parallel import RankGroup, join_ranks, run_follower
from outrider.models.tokenizer import save_tokenizer
from outrider.observability.tracing import make_tracing
from outrider.runtime.serving import Service
from outrider.runtime.worker import run_worker
from outrider.settings.verifier import VerifierSettings
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService

log = structlog.get_logger(__name__)


def build(
    settings: VerifierSettings, scratch: Path, progress: Callable[[str], None], rank_group: RankGroup | None
) -> VerifierService:
    tracing = make_tracing(settings.otlp_endpoint, "verifier")
    if settings.selected_engine == "mock":
        log.warning("mock engine selected: no model, for measuring overhead only")
        mock = MockEngine()
        return VerifierService(
            EngineTarget(mock), mock.vocabulary, mock.save_tokenizer(scratch), settings, tracing=tracing
        )
    loaded = load_model(settings.target, EngineOptions.of(settings), progress, rank_group)
    files = save_tokenizer(loaded.tokenizer, scratch)
    return VerifierService(EngineTarget(loaded.engine), loaded.vocabulary, files, settings, loaded.cost, tracing)


def serve(settings: VerifierSettings, rank_group: RankGroup | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="outrider-verifier-") as scratch:
        use_threads(settings.threads)

        def built(progress: Callable[[str], None]) -> Service:
            return build(settings, Path(scratch), progress, rank_group)

        run_worker("verifier", settings, built)


def run(settings: VerifierSettings) -> None:
    if settings.tensor_parallel == 1:
        serve(settings)
        return
    set_up_logs(settings.log_level, as_json=settings.log_json, service="verifier")
    command = [sys.executable, "-m", "verifier", *flags(settings)]
    with join_ranks(settings.tensor_parallel, settings, command) as rank_group:
        if rank_group.is_leader:
            serve(settings, rank_group)
        else:
            run_follower(
                load_model(settings.target, EngineOptions.of(settings), rank_group=rank_group).engine, rank_group
            )


if __name__ == "__main__":
    main(VerifierSettings, run, "verifier")
