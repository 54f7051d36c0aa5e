"""Worker connection: streams to one worker, its load, and whether it may be used."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import grpc
import structlog

from coordinator.control.estimator import SMOOTHING, WINDOW
from coordinator.placement.sent_prefixes import SentPrefixes
from coordinator.workers.worker_channel import WorkerChannel
from outrider.base.aio import cancel_all
from outrider.base.decayed_mean import DecayedMean
from outrider.base.rpc_status import error_from_rpc
from outrider.multiplex.calls import SessionCall
from outrider.multiplex.client import Metadata, WorkerCalls
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError, ProtocolViolation, Unauthenticated, Unavailable
from outrider.protocol.fleet import Role, WorkerInfo, WorkerLoad
from outrider.security.channels import Channels
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc

log = structlog.get_logger(__name__)

SILENT_S = 2.0  # without a message or an answer to a probe: four probes
PROBE_S = 1.0
PROBE_BUSY_S = 0.5  # of a worker with sessions of this coordinator
PROBE_TIMEOUT_S = 2.0
UNWATCHED_S = 0.5  # two ticks: the most of a round trip that none of them has counted
FORGETS_S = 30.0  # idle
BACKOFF_S = 0.5
MAX_BACKOFF_S = 5.0
FULL_S = 0.05
_SMOOTHING = 0.3
_CHANGE_SMOOTHING = 0.5  # of round trips that differ too much for noise
_SLOWER = 1.4  # factors that count as such a change
_FASTER = 1.25
_METHODS = {Role.VERIFIER: ("outrider.v1.Verifier", "Verify"), Role.DRAFTER: ("outrider.v1.Drafter", "Draft")}
_TOO_LARGE = "CLIENT: Received message larger than max"  # gRPC's message for an oversized reply


class Stream(Protocol):
    """Stream to a worker, as far as liveness uses it."""

    def cancel(self, error: OutriderError) -> None: ...

    def overdue_s(self, tick_s: float, load: WorkerLoad, timeout_s: float) -> float:
        """Advance by a tick; return for how long an answer is overdue, or 0."""


class WorkerConnection:
    """Connection to one worker, probed for its load and its round trip."""

    def __init__(self, info: WorkerInfo, access: Callable[[], Channels]) -> None:
        """Open the channel; `access` is called before each use, because keys and certificates change."""
        self.info = info
        self.streams: set[Stream] = set()  # of this coordinator's sessions
        self.prefixes = SentPrefixes()  # of prompts, for verifiers
        self.plain_steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # of a verifier
        self.direct_waits = DecayedMean(SMOOTHING)  # ms; of a drafter in its verifier's process
        self.silent_s = 0.0  # since the last message or answer to a probe, in ticks of `liveness`
        self.watched_s = 0.0  # in all, in the same ticks
        self.is_stuck = False  # a verdict is overdue and none has come since: waiting there leads nowhere
        self.round_trip_ms = 0.0
        self.registrations = 0  # streams over which it reports to this coordinator
        self.reported_at = time.monotonic()  # last report over such a stream
        self.seen_at = self.reported_at  # last report over such a stream or, from another coordinator, in Redis
        self._failures = 0
        self._not_before = self._idle_s = 0.0
        self._channel = WorkerChannel(info, access, self.streams)
        service, method = _METHODS[info.role]
        self._calls = WorkerCalls(service, method, self._channel.max_bytes)
        self._probing = asyncio.create_task(self._probe())

    @property
    def sessions(self) -> int:
        return len(self.streams)

    @property
    def verifier(self) -> verifier_pb2_grpc.VerifierAsyncStub:
        return verifier_pb2_grpc.VerifierStub(self._channel.current())  # type: ignore[return-value]

    @property
    def drafter(self) -> drafter_pb2_grpc.DrafterAsyncStub:
        return drafter_pb2_grpc.DrafterStub(self._channel.current())  # type: ignore[return-value]

    def start_session(self, metadata: Metadata) -> SessionCall:
        return self._calls.start(self._channel.current(), metadata)

    @property
    def attributes(self) -> dict[str, str | int]:
        """Return the worker's attributes for a trace."""
        host, _, port = self.info.address.rpartition(":")
        worker: dict[str, str | int] = {"outrider.worker": self.info.worker_id, "outrider.kind": self.info.kind}
        return worker | {"server.address": host.strip("[]"), "server.port": int(port) if port.isdecimal() else 0}

    @property
    def is_silent(self) -> bool:
        return self.silent_s >= SILENT_S

    def usable(self) -> bool:
        return not self.info.draining and time.monotonic() >= self._not_before

    def record_failure(self) -> None:
        """Stop using the worker for a moment, doubled with each failure in a row. Of those at once, one counts."""
        self._failures = max(1, self._failures + (time.monotonic() >= self._not_before))
        self._not_before = time.monotonic() + min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(8, self._failures - 1))

    def record_full(self) -> None:
        """Stop using a worker without capacity for a short time: any ended session may free some."""
        self._not_before = max(self._not_before, time.monotonic() + FULL_S)

    def record_success(self) -> None:
        self._failures = 0

    async def close(self) -> None:
        try:
            await cancel_all([self._probing])
            await self._calls.close()
        finally:  # the registration that replaces this one may end meanwhile
            await self._channel.close()

    async def _probe(self) -> None:
        while True:
            await self._channel.close_unused()
            stub = self.verifier if self.info.role is Role.VERIFIER else self.drafter
            self._calls.keep_open(self._channel.current())
            started, watched_s = time.perf_counter(), self.watched_s
            try:
                reply: common.ProbeReply | None = await stub.Probe(common.ProbeRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._handle_failed_probe(error)
                reply = None
            if reply is not None:  # gRPC also returns None for bytes that it cannot decode
                self.silent_s = 0.0
                seconds, load = time.perf_counter() - started, convert.load_from_proto(reply.load)
                if seconds <= self.watched_s - watched_s + UNWATCHED_S:  # else this process was stopped meanwhile
                    self.round_trip_ms = _smooth(self.round_trip_ms, 1000 * seconds)
                self.is_stuck &= load.step_ms == self.info.load.step_ms  # else it has computed since
                self.info = replace(self.info, load=load, draining=reply.draining)
            self._idle_s = 0.0 if self.streams else self._idle_s + PROBE_S
            if self._idle_s > FORGETS_S:  # what slowed its steps may have ended
                self.plain_steps.clear()
                self.direct_waits = DecayedMean(SMOOTHING)
            await asyncio.sleep(PROBE_BUSY_S if self.streams else PROBE_S)

    def _handle_failed_probe(self, error: grpc.aio.AioRpcError) -> None:
        log.debug("probe failed", worker=self.info.worker_id, status=error.code().name)
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if self._failures == 0:
                log.warning("worker rejected", reason=worker_error(self.info.address, error).message)
            self.record_failure()  # it would reject sessions too


def worker_error(address: str, error: grpc.RpcError) -> OutriderError:
    """Return a failed call to a worker as an error for clients, who cannot mend a rejected fleet key."""
    details = str(error.details() or "")
    if details.startswith(_TOO_LARGE):
        return ProtocolViolation(f"{address} sent too large a message: {details}")
    meant = error_from_rpc(error)
    if isinstance(meant, Unauthenticated):
        return Unavailable(f"{address} does not accept this coordinator's fleet key; all services need the same one")
    return meant


def _smooth(known_ms: float, measured_ms: float) -> float:
    """Return the smoothed round trip. A large change counts more: it is rarely noise."""
    if known_ms == 0.0:
        return measured_ms
    noise = known_ms / _FASTER <= measured_ms <= known_ms * _SLOWER
    return known_ms + (_SMOOTHING if noise else _CHANGE_SMOOTHING) * (measured_ms - known_ms)
