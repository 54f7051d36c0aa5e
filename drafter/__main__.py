"""`python -m drafter`: serve guesses."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from drafter.settings import DrafterSettings
from outrider.config import main
from outrider.models import AUTO, MODEL_FREE, choose_drafter
from outrider.serving import Service
from outrider.threads import use_threads
from outrider.tracing import tracing_to


def run(settings: DrafterSettings) -> None:
    if settings.kind == AUTO:
        kind, model = choose_drafter(settings.model or AUTO, settings.target)
        settings = settings.model_copy(update={"kind": kind, "model": model})
    if set(settings.kind.split("+")) <= MODEL_FREE:
        importlib.import_module("outrider.torchless")
    else:
        use_threads(settings.threads)
    serve(settings)


def serve(settings: DrafterSettings) -> None:
    # Imported here: what follows loads torch unless `run` has shut it out.
    from drafter.drafters import make
    from drafter.service import DrafterService
    from outrider.worker import run_worker

    def build(progress: Callable[[str], None]) -> Service:
        tracing = tracing_to(settings.otlp_endpoint, "drafter")
        progress(f"preparing the {settings.kind} drafter")
        return DrafterService(make(settings, progress), settings, tracing)

    run_worker("drafter", settings, build)


if __name__ == "__main__":
    main(DrafterSettings, run, "drafter")
