"""The drafter in a verifier's process, of `--own-drafter`; its entry point keeps services from importing each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafter.service import DrafterService, prepared
from outrider.base.config import DrafterKey, Settings, WorkerSettings
from outrider.models.drafter_choice import choose_drafter
from outrider.settings.drafter import DrafterSettings
from outrider.speculation.direct import VerifierBeside

_OF_WORKERS = {"coordinators", "advertise", "metrics_key", "metrics_tls", "max_sessions", "device"}
_SHARED = {*Settings.model_fields, *DrafterKey.model_fields} | _OF_WORKERS


def build(
    settings: WorkerSettings, drafter: str, target: str, verifier: VerifierBeside, progress: Callable[[str], None]
) -> DrafterService:
    """Build the service from its verifier's settings. Its metrics have the next port."""
    kind, model = choose_drafter(drafter, target)
    own = settings.model_dump(include=_SHARED, exclude_defaults=True)
    own["threads"] = max(1, (settings.threads or torch.get_num_threads()) // 2)  # the others send what was committed
    if settings.metrics_port:
        own["metrics_port"] = settings.metrics_port + 1
    return prepared(DrafterSettings(**own, kind=kind, model=model, target=target), progress, verifier)
