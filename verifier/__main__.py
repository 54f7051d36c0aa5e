"""`python -m verifier`: serve a target model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog

from outrider.config import main
from outrider.engine.instant import InstantEngine
from outrider.engine.load import load_model
from outrider.serving import Service
from outrider.tokenizer import save_tokenizer
from outrider.worker import run_worker
from verifier.service import VerifierService
from verifier.settings import VerifierSettings

log = structlog.get_logger(__name__)


def build(settings: VerifierSettings, scratch: Path, progress: Callable[[str], None]) -> VerifierService:
    if settings.engine == "instant":
        log.warning("engine 'instant' holds no model: for measuring overhead only")
        instant = InstantEngine()
        return VerifierService(instant, instant.vocabulary, instant.save_tokenizer(scratch), settings)
    loaded = load_model(settings.target, device=settings.device, dtype=settings.dtype, progress=progress)
    return VerifierService(loaded.engine, loaded.vocabulary, save_tokenizer(loaded.tokenizer, scratch), settings)


def run(settings: VerifierSettings) -> None:
    with tempfile.TemporaryDirectory(prefix="outrider-verifier-") as scratch:

        def built(progress: Callable[[str], None]) -> Service:
            return build(settings, Path(scratch), progress)

        run_worker(settings, built)


if __name__ == "__main__":
    main(VerifierSettings, run, "verifier")
