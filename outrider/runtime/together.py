"""Two services in one process, at one address."""

from __future__ import annotations

import asyncio

import grpc

from outrider.base.aio import critical_task
from outrider.runtime.serving import Service
from outrider.security.auth_interceptor import AuthInterceptor


class Together:
    """A service made of two; the second one depends on the first."""

    def __init__(self, first: Service, second: Service, auth: AuthInterceptor) -> None:
        """Join the services; `auth` checks the keys of both."""
        self._services = (first, second)
        self.credentials = first.credentials
        self.names = (*first.names, *second.names)
        self.auth_interceptor = auth
        self.interceptors = first.interceptors
        self._following: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        for service in self._services:
            service.add_to(server)

    async def start(self, port: int) -> None:
        for service in self._services:
            await service.start(port)
        self._following = critical_task(self._services[1].credentials.follow(), "following keys")

    def drain(self) -> None:
        for service in self._services:
            service.drain()

    def busy(self) -> bool:
        return any(service.busy() for service in self._services)

    def ready(self) -> bool:
        return all(service.ready() for service in self._services)

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        for service in reversed(self._services):
            await service.stop()
