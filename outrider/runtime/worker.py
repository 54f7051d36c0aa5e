"""Start of drafters and verifiers. The module does not import torch: not every drafter runs a model."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import structlog

from outrider.base.config import WorkerSettings
from outrider.base.logs import report_progress, set_up_logs
from outrider.protocol.errors import StartupError
from outrider.runtime.serving import Service, serve
from outrider.security.credentials import Credentials

log = structlog.get_logger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class WorkerIdentity:
    """Random id of a worker, and the address that it registers."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.worker_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.coordinators = [check_address("coordinators", part) for part in settings.coordinators.split(",") if part]
        self.address = check_address("advertise", settings.advertise) if settings.advertise else ""
        self.machine = _machine()
        self._host = settings.host

    def listen_on(self, port: int) -> None:
        if not self.address:
            host = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host  # noqa: S104
            self.address = f"{host}:{port}"


def _machine() -> str:
    """Return an id of the machine's boot, equal in all its containers; empty if the system has none."""
    try:
        return hashlib.sha256(_BOOT.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def check_address(field: str, text: str) -> str:
    host, colon, port = text.strip().rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise StartupError(f"{field} is {text!r}, must be host:port", field=field, value=text, limit="host:port")
    return text.strip()


def run_worker(name: str, settings: WorkerSettings, build: Callable[[Callable[[str], None]], Service]) -> None:
    """Load and run a worker."""
    set_up_logs(settings.log_level, as_json=settings.log_json, service=name)
    for option, replacement in settings.deprecated:
        log.warning("deprecated option", option=option, replacement=replacement)
    Credentials(settings)  # report an unreadable key or certificate before the model is loaded

    async def run() -> None:
        service = build(report_progress)
        await serve(service, settings, ready=lambda address: report_progress(f"ready at {address}"))

    asyncio.run(run())
