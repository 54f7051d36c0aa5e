"""Streams to workers that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions import streams
from coordinator.sessions.streams import PLAIN_STEPS, VerifierStream, WorkerStream
from coordinator.workers import liveness, worker_connection
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.worker_connection import Stream, WorkerConnection
from outrider.base.aio import background
from outrider.multiplex.calls import rpc_error
from outrider.observability.tracing import Span
from outrider.protocol import convert
from outrider.protocol.errors import PeerLost
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import TokenKind, Verdict, VerifySteering
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import verifier_pb2 as verify
from outrider.v1 import verifier_pb2_grpc
from tests.unit.coordinator.sessions.calls import Sent


async def test_a_worker_that_left_after_it_was_chosen_is_lost_like_any_other() -> None:
    """Its channel is closed, which gRPC reports by an error of its own."""
    info = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    connection = WorkerConnection(info, lambda: FleetKeys().access(Role.DRAFTER))
    await connection.close()
    ended: list[BaseException | None] = []

    class Spy(Span):
        def end(self, error: BaseException | None = None) -> None:
            ended.append(error)

    stream: WorkerStream[draft.DraftRequest, draft.DraftReply] = WorkerStream(
        connection, draft.DraftRequest(), draft.DraftReply.FromString, Spy()
    )
    with pytest.raises(PeerLost, match="has left") as lost:
        async with stream:
            pass
    assert not connection.streams
    assert ended == [lost.value], "its span in the trace failed, too"


@pytest.mark.parametrize(("address", "host"), [("10.0.0.5:50051", "10.0.0.5"), ("[fd00::5]:50051", "fd00::5")])
async def test_spans_name_hosts_and_ports_apart(address: str, host: str) -> None:
    """OpenTelemetry's conventions want it: backends draw services by the host."""
    info = WorkerInfo("d", Role.DRAFTER, address, ModelInfo("m", "f"))
    connection = WorkerConnection(info, lambda: FleetKeys().access(Role.DRAFTER))
    assert (connection.attributes["server.address"], connection.attributes["server.port"]) == (host, 50051)
    await connection.close()


async def test_a_worker_may_fail_for_days() -> None:
    """Its backoff doubles no further: past a thousand failures a float could not hold it."""
    connection = WorkerConnection(
        WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f")), lambda: FleetKeys().access(Role.DRAFTER)
    )
    for _ in range(3000):  # of probes, once a second
        connection._not_before = 0.0
        connection.record_failure()
    assert not connection.usable()
    connection.record_success()
    await connection.close()


async def test_a_worker_that_all_its_sessions_lose_at_once_has_failed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the connection breaks: eight sessions of a fleet's only verifier waited five seconds for it."""
    monkeypatch.setattr(worker_connection, "BACKOFF_S", 60.0)
    connection = WorkerConnection(
        WorkerInfo("v", Role.VERIFIER, "127.0.0.1:1", ModelInfo("m", "f")), lambda: FleetKeys().access(Role.VERIFIER)
    )
    for times in (1, 2):  # one failure after the other counts
        for _ in range(8):
            connection.record_failure()
        assert connection._failures == times
        assert not connection.usable()
        connection._not_before = 0.0
    await connection.close()


async def test_a_worker_without_sessions_forgets_what_its_steps_and_guesses_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What made them slow may have ended: against such steps every loss of the next answer would be a gain."""
    monkeypatch.setattr(worker_connection, "PROBE_S", 0.02)
    monkeypatch.setattr(worker_connection, "PROBE_BUSY_S", 0.02)
    monkeypatch.setattr(worker_connection, "PROBE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(worker_connection, "FORGETS_S", 0.1)
    connection = WorkerConnection(
        WorkerInfo("v", Role.VERIFIER, "127.0.0.1:1", ModelInfo("m", "f")), lambda: FleetKeys().access(Role.VERIFIER)
    )
    connection.plain_steps.append((4.0, 0.1))
    connection.direct_waits.add(9.0)
    connection.streams.add(cast(Stream, object()))
    await asyncio.sleep(0.5)
    assert connection.plain_steps, "in use"
    assert connection.direct_waits.known
    connection.streams.clear()
    async with asyncio.timeout(10):
        while connection.plain_steps or connection.direct_waits.known:
            await asyncio.sleep(0.01)
    await connection.close()


class Prober(verifier_pb2_grpc.VerifierServicer):
    """A verifier in this process that answers probes, and may stop the process before it does."""

    def __init__(self) -> None:
        self.probes = 0
        self.stop_s = 0.0
        self.load = WorkerLoad(waiting=1, step_ms=8.0)

    def _stop(self) -> None:
        time.sleep(self.stop_s)
        self.stop_s = 0.0

    async def Probe(self, request: common.ProbeRequest, context: object) -> common.ProbeReply:
        self.probes += 1
        self._stop()
        return common.ProbeReply(load=convert.load_to_proto(self.load))


@asynccontextmanager
async def probed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[WorkerConnection, Prober, Callable[[], Any]]]:
    """A connection to it, watched as in a coordinator, and what waits for one more answer."""
    monkeypatch.setattr(worker_connection, "PROBE_S", 0.02)
    prober, server = Prober(), grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(prober, server)  # type: ignore[no-untyped-call,unused-ignore]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    info = WorkerInfo("v", Role.VERIFIER, f"127.0.0.1:{port}", ModelInfo("m", "f"))
    connection = WorkerConnection(info, lambda: FleetKeys().access(Role.VERIFIER))

    async def answers() -> None:
        upto = prober.probes + 2  # the last of them may not have arrived
        async with asyncio.timeout(10):
            while prober.probes < upto:
                await asyncio.sleep(0.01)

    try:
        async with background(liveness.watch(lambda: [connection], lambda _: True, 10.0)):
            await answers()
            yield connection, prober, answers
    finally:
        await connection.close()
        await server.stop(None)


async def test_a_pause_of_this_process_is_no_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP: new sessions would believe in a network of seconds."""
    async with probed(monkeypatch) as (connection, prober, answers):
        prober.stop_s = 1.5
        await answers()
        assert not prober.stop_s
        assert 0.0 < connection.round_trip_ms < 300.0


async def test_a_verifier_that_computes_again_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our prompts may wait there behind the sessions of other coordinators, without a verdict for ours."""
    async with probed(monkeypatch) as (connection, prober, answers):
        connection.is_stuck = True
        await answers()
        assert connection.is_stuck, "its engine hangs, its process answers"
        prober.load = replace(prober.load, step_ms=9.0)
        await answers()
        assert not connection.is_stuck


def test_a_verifier_may_join_plain_steps_only_while_no_guesses_are_made() -> None:
    """From steps that waited for guesses in vain, control learns one by one."""
    record = SessionRecord("s", SessionRequest((1, 2), SamplingParams(seed=1)))
    info = WorkerInfo("v", Role.VERIFIER, "127.0.0.1:1", ModelInfo("m", "f"))
    connection = cast(WorkerConnection, SimpleNamespace(info=info))
    stream = VerifierStream(connection, record, info.model, Span(), VerifySteering())
    assert stream._opening.open.steer.plain_steps == PLAIN_STEPS
    stream._call = sent = Sent(verify.VerifyRequest)
    for steering in (VerifySteering(gamma=4), VerifySteering(nodes=2), VerifySteering(gamma=0)):
        stream.steer(steering)
    steers = [message.steer for message in sent.messages]
    assert [steer.plain_steps if steer.HasField("plain_steps") else None for steer in steers] == [1, None, PLAIN_STEPS]


def stream_of(connection: object, read: Callable[[], Awaitable[object]]) -> WorkerStream[Any, draft.DraftReply]:
    """To a drafter that answers what `read` returns."""
    stream: WorkerStream[draft.DraftRequest, draft.DraftReply] = WorkerStream(
        cast(WorkerConnection, connection), draft.DraftRequest(), draft.DraftReply.FromString, Span()
    )
    stream._call = SimpleNamespace(read=read)
    return stream


async def test_a_worker_that_does_not_open_a_session_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers probes, so nothing else ends the wait."""
    monkeypatch.setattr(streams, "OPEN_TIMEOUT_S", 0.05)
    info = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    stream = stream_of(SimpleNamespace(info=info), asyncio.Event().wait)
    async with asyncio.timeout(5):
        with pytest.raises(PeerLost, match="did not answer"):
            await stream.opened()


async def test_a_worker_that_sends_messages_is_not_silent() -> None:
    """A busy one answers probes late."""
    connection = SimpleNamespace(silent_s=9.0)
    assert await stream_of(connection, partial(asyncio.sleep, 0, b"")).receive() == draft.DraftReply()
    assert connection.silent_s == 0.0


async def test_a_worker_that_refuses_our_key_rests() -> None:
    """It would refuse sessions too."""
    info = WorkerInfo("d", Role.DRAFTER, "127.0.0.1:1", ModelInfo("m", "f"))
    connection = WorkerConnection(info, lambda: FleetKeys().access(Role.DRAFTER))
    for code, usable in ((grpc.StatusCode.DEADLINE_EXCEEDED, True), (grpc.StatusCode.UNAUTHENTICATED, False)):
        connection._handle_failed_probe(rpc_error(code, "no"))
        assert connection.usable() is usable
    await connection.close()


async def test_a_verdict_tells_that_its_verifier_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SessionRecord("s", SessionRequest((1, 2), SamplingParams(seed=1, max_tokens=9)))
    connection: Any = SimpleNamespace(silent_s=0.0, is_stuck=True, info=SimpleNamespace(address="v:1"))
    stream = VerifierStream(connection, record, ModelInfo("m", "f", vocab_size=9), Span(), VerifySteering())
    verdict = convert.verdict_to_proto(Verdict(2, (5,), 0, TokenKind.PLAIN))
    received = iter([verify.VerifyReply(verdict=verdict), None])

    async def receive() -> verify.VerifyReply | None:
        return next(received)

    monkeypatch.setattr(stream, "receive", receive)
    assert [reply async for reply in stream.replies()]
    assert not connection.is_stuck
