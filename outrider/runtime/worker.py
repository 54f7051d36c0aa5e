"""Start of drafters and verifiers. The module does not import torch: not every drafter runs a model."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from outrider.base.config import WorkerSettings
from outrider.base.logs import report_progress, set_up_logs
from outrider.base.openmp import compute_alone, release_threads
from outrider.runtime.serving import Service, serve
from outrider.runtime.worker_service import addresses, check_address
from outrider.security.credentials import Credentials

_SWITCH_S = 1e-4  # after which a thread that computes gets the interpreter from the event loop, which sends verdicts


def run_worker(name: str, settings: WorkerSettings, build: Callable[[Callable[[str], None]], Service]) -> None:
    """Load and run a worker."""
    set_up_logs(settings.log_level, as_json=settings.log_json, service=name)
    # Report an unreadable key or certificate, or a wrong address, before the model is loaded.
    Credentials(settings)
    addresses("coordinators", settings.coordinators)
    check_address("advertise", settings.advertise)

    async def run() -> None:
        interrupted = signal.getsignal(signal.SIGINT)
        if interrupted != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for the end of `build`
        service = build(report_progress)
        signal.signal(signal.SIGINT, interrupted)
        release_threads()  # another thread runs the model
        compute_alone()
        sys.setswitchinterval(_SWITCH_S)
        await serve(service, settings, ready=lambda address: report_progress(f"ready at {address}"))

    asyncio.run(run())
