"""What a worker leaves open, and tells, that registers again and again, and what a coordinator may answer."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog

from outrider.base.aio import until
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.vocabulary import Vocabulary
from outrider.runtime import registration_client
from outrider.runtime.registration_client import RegistrationClient
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from tests.descriptors import open_files

_ATTEMPTS = 12
_CLOSES_S = 20.0


class _Ending(rpc.RegistryServicer):
    """Asks for the vocabulary and ends before it has it, as a coordinator that shuts down does."""

    asked = 0

    async def Register(self, requests: Any, context: Any) -> AsyncIterator[pb.RegisterReply]:
        await anext(requests)
        yield pb.RegisterReply(send_vocabulary=True)
        self.asked += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")


async def test_a_registration_that_fails_keeps_no_socket_open_until_the_next_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration_client, "RETRY_S", 0.01)
    server, ending = grpc.aio.server(), _Ending()
    rpc.add_RegistryServicer_to_server(ending, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker = WorkerInfo("w", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    client = RegistrationClient([address], lambda: worker, Vocabulary(("a token of this length",) * 300_000))
    running = asyncio.create_task(client.run())
    try:
        await _asked(ending, 2)
        gc.collect()
        gc.disable()
        before = sum(opened.startswith("socket:") for opened in open_files(os.getpid()))
        await _asked(ending, ending.asked + _ATTEMPTS)
        async with asyncio.timeout(_CLOSES_S):
            while sum(opened.startswith("socket:") for opened in open_files(os.getpid())) > before + 4:
                await asyncio.sleep(0.05)
    finally:
        gc.enable()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


class _Answering:
    """Answers every registration with these bytes, and counts the reports."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.registrations = self.reports = 0

    async def register(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.registrations += 1
        yield self.answer
        async for _ in requests:
            self.reports += 1


@asynccontextmanager
async def _registering_at(answering: _Answering) -> AsyncIterator[asyncio.Task[None]]:
    server = grpc.aio.server()
    methods = {"Register": grpc.stream_stream_rpc_method_handler(answering.register)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.Registry", methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker = WorkerInfo("w", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    running = asyncio.create_task(RegistrationClient([address], lambda: worker, None).run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def test_a_reply_that_is_no_message_does_not_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_client, "RETRY_S", 0.01)
    answering = _Answering(b"\xff\xff\xff")
    async with _registering_at(answering) as running:
        assert await until(lambda: answering.registrations > 2 or running.done(), _CLOSES_S)
        assert not running.done(), "it is critical: its end is that of the process"


async def test_a_coordinator_that_names_no_interval_gets_no_flood_of_reports() -> None:
    answering = _Answering(pb.RegisterReply(accepted=True).SerializeToString())
    async with _registering_at(answering):
        assert await until(lambda: answering.reports > 2, _CLOSES_S)
        before = answering.reports
        await asyncio.sleep(0.2)
        assert answering.reports <= before + 5


class _Refusing(rpc.RegistryServicer):
    """Refuses a worker once, as a drafter whose target is not there yet, and then takes it."""

    refused = False

    async def Register(self, requests: Any, context: Any) -> AsyncIterator[pb.RegisterReply]:
        await anext(requests)
        if not self.refused:
            self.refused = True
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another vocabulary")
        yield pb.RegisterReply(accepted=True, heartbeat_ms=1000)
        await asyncio.Event().wait()


async def test_a_refusal_is_taken_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registration_client, "RETRY_S", 0.01)
    server = grpc.aio.server()
    rpc.add_RegistryServicer_to_server(_Refusing(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker, said = WorkerInfo("w", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f")), ""
    running = asyncio.create_task(RegistrationClient([address], lambda: worker, None).run())
    try:
        async with asyncio.timeout(_CLOSES_S):
            while not said.endswith("progress: registered\n"):
                said += capsys.readouterr().out
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)
    shown = [line for line in said.splitlines() if line.startswith("progress: ")]
    assert shown == ["progress: not registered: failed_precondition: another vocabulary", "progress: registered"]


async def test_of_several_coordinators_each_tells_its_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may wait for days, and attempts follow each other twice a second."""
    monkeypatch.setattr(registration_client, "RETRY_S", 0.0)
    monkeypatch.setattr(registration_client, "report_progress", (shown := []).append)
    worker = WorkerInfo("w", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    away = ["127.0.0.1:1", "127.0.0.1:2"]
    client, tried = RegistrationClient(away, lambda: worker, None), Counter[str]()
    attempt = client._report_to

    async def counted(address: str) -> None:
        tried[address] += 1
        await attempt(address)

    monkeypatch.setattr(client, "_report_to", counted)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(client.run())
        async with asyncio.timeout(_CLOSES_S):
            while min(tried.values(), default=0) < 4:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [line["coordinator"] for line in logs] == away
    assert len(shown) == len(away)


async def _asked(ending: _Ending, times: int) -> None:
    async with asyncio.timeout(_CLOSES_S):
        while ending.asked < times:
            await asyncio.sleep(0.01)
