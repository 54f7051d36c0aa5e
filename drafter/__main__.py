"""`python -m drafter`: run the drafter service."""

from __future__ import annotations

import importlib
from functools import partial

from outrider.base.config import check_installed, main
from outrider.base.openmp import use_threads
from outrider.models.drafter_choice import AUTO, MODEL_FREE, choose_drafter
from outrider.protocol.errors import StartupError
from outrider.settings.drafter import DrafterSettings

_WITHOUT_ENGINE = MODEL_FREE | {"medusa", "mock"}


def run(settings: DrafterSettings) -> None:
    settings = select_method(settings)
    if set(settings.kind.split("+")) <= MODEL_FREE:
        importlib.import_module("outrider.base.no_torch")
    else:
        check_installed("torch", "models")
        use_threads(settings.threads)
    # Imported here: these modules load torch, unless it was blocked.
    from drafter.service import prepared
    from outrider.runtime.worker import run_worker

    run_worker("drafter", settings, partial(prepared, settings))


def select_method(settings: DrafterSettings) -> DrafterSettings:
    """Return the settings with the drafting method that runs. Raises StartupError where --engine excludes it."""
    if settings.engine == "mock":
        if settings.kind not in (AUTO, "mock"):
            raise StartupError.of("kind", settings.kind, "mock", " with --engine mock")
        return settings.model_copy(update={"kind": "mock", "model": ""})
    if settings.kind == AUTO:
        kind, model = choose_drafter(settings.model or AUTO, settings.target)
        settings = settings.model_copy(update={"kind": kind, "model": model})
    if settings.engine != "auto" and set(settings.kind.split("+")) <= _WITHOUT_ENGINE:
        raise StartupError.of("engine", settings.engine, "auto", f": kind {settings.kind} runs no engine")
    return settings


if __name__ == "__main__":
    main(DrafterSettings, run, "drafter")
