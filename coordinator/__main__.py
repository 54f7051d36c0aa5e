"""`python -m coordinator`: serve clients."""

from __future__ import annotations

import outrider.base.no_torch  # noqa: F401
from outrider.base.config import main, redis_url, resolved_redis_url  # before anything imports gRPC

# isort: split

import asyncio
import contextlib

import structlog

from coordinator.api.service import CoordinatorService
from outrider.base.logs import report_progress, set_up_logs
from outrider.runtime.embedded_redis import embedded_redis
from outrider.runtime.serving import serve
from outrider.settings.coordinator import CoordinatorSettings

log = structlog.get_logger(__name__)


def run(settings: CoordinatorSettings) -> None:
    set_up_logs(settings.log_level, as_json=settings.log_json, service="coordinator")
    given = resolved_redis_url(settings.redis_url) or redis_url()
    with contextlib.ExitStack() as stack:
        if given is None:
            log.warning("no REDIS_URL: sessions are kept in an embedded Redis and end with this process")
        url = given or stack.enter_context(embedded_redis())

        async def serve_clients() -> None:
            service = CoordinatorService(settings, url)

            def ready(address: str) -> None:
                if service.http_address:
                    report_progress(f"http at {service.http_address}")
                report_progress(f"ready at {address}")

            await serve(service, settings, ready=ready)

        asyncio.run(serve_clients())


if __name__ == "__main__":
    main(CoordinatorSettings, run, "coordinator")
