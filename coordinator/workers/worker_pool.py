"""Who is there to work: verifiers and drafters, as they report and as Redis tells of other coordinators' workers.

Keeps one connection to each, measures its round trip, and chooses the least
loaded for a session.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import structlog

from coordinator.persistence.store import Store, StoreDown
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.liveness import Silence, Stream, watch
from coordinator.workers.shunned import ShunnedWorkers
from coordinator.workers.target import Target, fetch_target
from outrider.base.rpc_status import error_from_rpc
from outrider.protocol import convert
from outrider.protocol.errors import (
    Conflict,
    InvalidRequest,
    ModelMismatch,
    OutriderError,
    Overloaded,
    ProtocolViolation,
    Unauthenticated,
    Unavailable,
)
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo, WorkerLoad
from outrider.protocol.message_limits import MAX_DRAFTER_MESSAGE_BYTES
from outrider.security.channels import Channels
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc

log = structlog.get_logger(__name__)

PROBE_S = 1.0
PROBE_BUSY_S = 0.5  # of a worker that has sessions of ours
PROBE_TIMEOUT_S = 2.0
COOLDOWN_S = 0.5
MAX_COOLDOWN_S = 5.0
LOOK_EVERY_S = 0.1
_SMOOTHING = 0.3
_LEAP = 1.4  # a round trip that differs so much is news, not noise: half of it is believed at once
_FALL = 1.25
LOST_AFTER_HEARTBEATS = 5
SILENT_AFTER_HEARTBEATS = 2.5  # then a worker may have been started again in the same place
MAX_WORKERS = 1024  # of a role
FULL_S = 0.05
_TOO_LARGE = "CLIENT: Received message larger than max"  # gRPC's own words, on this side


class WorkerConnection:
    """A connection to one worker, and how it is doing."""

    def __init__(self, info: WorkerInfo, access: Callable[[], Channels]) -> None:
        """`access`: asked for before each call, for keys and certificates change."""
        self.info = info
        self.streams: set[Stream] = set()  # of sessions that this coordinator has there
        self.silence = Silence()
        self.round_trip_ms = 0.0
        self.registrations = 0  # streams over which it reports to this coordinator
        self.heard = time.monotonic()  # when such a stream last brought something
        self._failures = 0
        self._not_before = 0.0
        self._access = access
        self._opened_with = access()
        self._channel = self._open()
        self._old: list[tuple[grpc.aio.Channel, set[Stream]]] = []  # with the streams that they may still carry
        self._probing = asyncio.create_task(self._probe())

    @property
    def sessions(self) -> int:
        return len(self.streams)

    @property
    def verifier(self) -> verifier_pb2_grpc.VerifierAsyncStub:
        return verifier_pb2_grpc.VerifierStub(self._current())  # type: ignore[return-value]

    @property
    def drafter(self) -> drafter_pb2_grpc.DrafterAsyncStub:
        return drafter_pb2_grpc.DrafterStub(self._current())  # type: ignore[return-value]

    @property
    def attributes(self) -> dict[str, str]:
        """Who it is, in a trace."""
        return {
            "server.address": self.info.address,
            "outrider.worker": self.info.worker_id,
            "outrider.kind": self.info.kind,
        }

    @property
    def state(self) -> str:
        """For a person."""
        if self.info.draining:
            return "draining"
        return "usable" if self.usable() else "resting"

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    def usable(self) -> bool:
        return not self.info.draining and time.monotonic() >= self._not_before

    def occupancy(self) -> float:
        """Share of its capacity in use, by our own count or its report, whichever is more."""
        load = max(self.sessions, self.info.load.sessions) + self.info.load.waiting
        return load / max(1, self.info.capacity)

    def failed(self) -> None:
        """Leave it alone for a moment, longer each time."""
        self._failures += 1
        self._not_before = time.monotonic() + min(MAX_COOLDOWN_S, COOLDOWN_S * 2 ** (self._failures - 1))

    def full(self) -> None:
        """It lives and has no room now, which may change with every session that ends."""
        self._not_before = max(self._not_before, time.monotonic() + FULL_S)

    def worked(self) -> None:
        self._failures = 0

    async def close(self) -> None:
        self._probing.cancel()
        await asyncio.gather(self._probing, return_exceptions=True)
        for channel in (self._channel, *(old for old, _ in self._old)):
            await channel.close()

    def _open(self) -> grpc.aio.Channel:
        # A drafter has little to say, and is not believed: gRPC drops what is larger before it is read.
        drafter = self.info.role is Role.DRAFTER
        return self._opened_with.aio_channel(self.info.address, MAX_DRAFTER_MESSAGE_BYTES if drafter else None)

    def _current(self) -> grpc.aio.Channel:
        """Return a channel with the key and the certificate of now; streams stay on the one that they began on."""
        if (access := self._access()) != self._opened_with:
            self._old.append((self._channel, set(self.streams)))
            self._opened_with = access
            self._channel = self._open()
        return self._channel

    async def _close_old(self) -> None:
        for entry in self._old[:]:
            channel, carried = entry
            if not carried & self.streams:
                self._old.remove(entry)
                await channel.close()

    async def _probe(self) -> None:
        while True:
            await self._close_old()
            stub = self.verifier if self.info.role is Role.VERIFIER else self.drafter
            started = time.perf_counter()
            try:
                reply: common.ProbeReply | None = await stub.Probe(common.ProbeRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._probe_failed(error)
                reply = None
            if reply is not None:  # None is also gRPC's word for bytes that it cannot decode
                self.silence.heard()
                taken = 1000 * (time.perf_counter() - started)
                known = self.round_trip_ms
                self.round_trip_ms = taken if known == 0.0 else known + _trust(known, taken) * (taken - known)
                self.info = replace(self.info, load=convert.load_from_proto(reply.load), draining=reply.draining)
            await asyncio.sleep(PROBE_BUSY_S if self.streams else PROBE_S)

    def _probe_failed(self, error: grpc.aio.AioRpcError) -> None:
        log.debug("probe failed", worker=self.info.worker_id, status=error.code().name)
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if self._failures == 0:
                log.warning("worker of no use", reason=worker_error(self.info.address, error).message)
            self.failed()  # it would take no session either


def worker_error(address: str, error: grpc.RpcError) -> OutriderError:
    """What a failed call to a worker means to others: its asking us for another key is no fault of a client's."""
    details = str(error.details() or "")
    if details.startswith(_TOO_LARGE):
        return ProtocolViolation(f"{address} sent too large a message: {details}")
    meant = error_from_rpc(error)
    if isinstance(meant, Unauthenticated):
        return Unavailable(f"{address} does not take this coordinator's fleet key; all services need the same one")
    return meant


def _trust(known: float, taken: float) -> float:
    """How much of a difference is believed: what is quicker by much was no accident, what is slower may have been."""
    return _SMOOTHING if known / _FALL <= taken <= known * _LEAP else 0.5


def _anybody(_: WorkerConnection) -> bool:
    return True


class WorkerPool:
    def __init__(
        self,
        store: Store,
        heartbeat_ms: int,
        fleet: FleetKeys,
        verdict_timeout_s: float,
        target_known: Callable[[ModelInfo], object] = lambda _: None,
    ) -> None:
        """`target_known` is called with each new target, before there is a session with it."""
        self._store = store
        self._target_known = target_known
        self._verdict_timeout_s = verdict_timeout_s
        self._heartbeat_ms = heartbeat_ms
        self._fleet = fleet
        self.shunning = ShunnedWorkers()
        self._links: dict[str, WorkerConnection] = {}
        self._unregistered: dict[str, WorkerConnection] = {}  # no longer in `_links`, with streams of sessions on them
        self._seen: dict[str, float] = {}
        self._left: dict[str, float] = {}  # workers whose streams have ended, and when
        self._target: Target | None = None
        self._target_lock = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def target(self) -> Target | None:
        return self._target

    @property
    def ready(self) -> bool:
        return self._target is not None and any(self.usable(link) for link in self._of(Role.VERIFIER))

    def usable(self, link: WorkerConnection) -> bool:
        return link.usable() and not self.shunning.shuns(link.info)

    def state(self, link: WorkerConnection) -> str:
        """For a person."""
        return "shunned" if self.shunning.shuns(link.info) else link.state

    def links(self) -> list[WorkerConnection]:
        return list(self._links.values())

    async def admit(self, info: WorkerInfo) -> WorkerConnection:
        """A worker reports to this coordinator. Raises ModelMismatch if it cannot work with the others.

        For a drafter whose vocabulary digest differs the caller asks for the
        vocabulary itself first: see `vocabulary_differs`.
        """
        self._refuse_impostor(info)
        await self._check(info)
        self._refuse_impostor(info)  # the check took its time
        link = await self._put(info)
        await self.heard_from(info, link)
        return link

    async def heard_from(self, info: WorkerInfo, link: WorkerConnection) -> None:
        """A worker's stream says how it is doing; `link` is what that stream was given."""
        if identity(info) != identity(link.info):
            raise InvalidRequest(
                f"a worker's stream is about {link.info.worker_id} and stays so: identity, role, address and model may "
                "not change; report over a stream of its own",
                field="worker",
                value=info.worker_id,
                limit="as in the first message",
            )
        if self._links.get(info.worker_id) is not link:
            return  # it was sent away meanwhile
        link.info = replace(info, load=_fresher(link.info.load, info.load))
        self._seen[info.worker_id] = link.heard = time.monotonic()
        try:
            await self._store.put_worker(info, LOST_AFTER_HEARTBEATS * self._heartbeat_ms)
        except StoreDown as error:
            log.debug("worker not recorded", worker=info.worker_id, error=error.message)

    async def left(self, worker_id: str) -> None:
        """A worker's registration stream has ended."""
        self._left[worker_id] = math.inf  # until Redis has forgotten it too
        await self._drop(worker_id)
        try:
            await self._store.remove_worker(worker_id)
        except StoreDown as error:
            log.debug("worker not removed from redis", worker=worker_id, error=error.message)
        finally:
            self._left[worker_id] = time.monotonic()

    def vocabulary_differs(self, info: WorkerInfo) -> bool:
        return (
            info.role is Role.DRAFTER
            and bool(info.model.vocabulary_digest)
            and self._target is not None
            and info.model.vocabulary_digest != self._target.info.vocabulary_digest
        )

    def choose(
        self, role: Role, fits: Callable[[WorkerConnection], bool] = _anybody, *, prefer: str = ""
    ) -> WorkerConnection | None:
        """Of those that fit the preferred worker if it can be had, else the least loaded."""
        able = [link for link in self._of(role) if self.usable(link) and fits(link)]
        able = [link for link in able if not link.silence] or able
        chosen = next((link for link in able if link.info.worker_id == prefer), None)
        if chosen is not None or not able:
            return chosen
        return min(able, key=lambda link: (link.occupancy(), link.round_trip_ms))

    async def wait_for(
        self, seconds: float, choose: Callable[[], WorkerConnection | None], *, look_every_s: float = LOOK_EVERY_S
    ) -> WorkerConnection | None:
        """The same, waiting for somebody to come."""
        deadline = time.monotonic() + seconds
        while (link := choose()) is None and time.monotonic() < deadline:
            self._changed.clear()
            try:
                # Cooldowns end without an event.
                async with asyncio.timeout(min(look_every_s, max(0.01, deadline - time.monotonic()))):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return link

    async def run(self) -> None:
        """Follow what other coordinators have heard, and notice who fell silent."""
        while True:
            await asyncio.sleep(self._heartbeat_ms / 1000)
            await self.look()

    async def look(self) -> None:
        """Read once what other coordinators have recorded."""
        asked = time.monotonic()
        try:
            known = await self._store.workers(LOST_AFTER_HEARTBEATS * self._heartbeat_ms / 1000)
        except StoreDown:
            known = []  # the last that was known stays in force
        for info in known:
            if self._left.get(info.worker_id, 0.0) < asked:  # else this was recorded before it left
                await self._learn(info)
        self._left = {worker_id: at for worker_id, at in self._left.items() if at >= asked}
        await self._forget_silent({info.worker_id for info in known})
        await self._close_unused()

    async def watch(self) -> None:
        """Take sessions from workers that fall silent."""
        await watch(lambda: [*self.links(), *self._unregistered.values()], self._has_spare, self._verdict_timeout_s)

    def _has_spare(self, silent: WorkerConnection) -> bool:
        others = [link for link in self._of(silent.info.role) if link is not silent]
        return any(self.usable(link) and not link.silence for link in others)

    async def close(self) -> None:
        for worker_id in list(self._links):
            await self._drop(worker_id)
        await self._close_unused(every=True)

    async def _learn(self, info: WorkerInfo) -> None:
        link = self._links.get(info.worker_id)
        if link is not None and identity(link.info) == identity(info):
            if not link.registrations:
                link.info = replace(info, load=_fresher(link.info.load, info.load))
            self._seen[info.worker_id] = time.monotonic()
            return
        try:
            self._refuse_impostor(info)
            await self._check(info)
            self._refuse_impostor(info)
            await self._put(info)
        except OutriderError as error:
            log.info("worker ignored", worker=info.worker_id, error=error.message)
        except Exception as error:  # what another has recorded, and what answers at its address, may be anything
            log.warning("worker ignored", worker=info.worker_id, error=repr(error)[:200])
        else:
            self._seen[info.worker_id] = time.monotonic()

    def _refuse_impostor(self, info: WorkerInfo) -> None:
        """Nobody takes the id or the place of a worker that is there.

        One that was started again has a new id, and its old stream is gone or silent by then.
        """
        for link in self._links.values():
            if (taken := self._takes(info, link)) is not None:
                field, value = taken
                raise Conflict(
                    f"another worker is registered with this {field}; wait until it has left, or use one of your own",
                    field=f"worker.{field}",
                    value=value,
                    limit="not in use",
                )
        if info.worker_id not in self._links and len(self._of(info.role)) >= MAX_WORKERS:
            raise Overloaded(f"{MAX_WORKERS} workers of this role are registered", field="worker", limit=MAX_WORKERS)

    def _takes(self, info: WorkerInfo, link: WorkerConnection) -> tuple[str, str] | None:
        """What of the other's it would take; None: nothing, or the other is not there any more."""
        reports = bool(link.registrations) and link.silent_s <= SILENT_AFTER_HEARTBEATS * self._heartbeat_ms / 1000
        if link.info.worker_id == info.worker_id:
            # What is only known from Redis is there until it is forgotten.
            there = reports or not link.registrations
            return ("worker_id", info.worker_id) if there and identity(link.info) != identity(info) else None
        return ("address", info.address) if reports and _place(link.info) == _place(info) else None

    async def _forget_silent(self, known: set[str]) -> None:
        limit = LOST_AFTER_HEARTBEATS * self._heartbeat_ms / 1000
        for worker_id, link in list(self._links.items()):
            silent = time.monotonic() - self._seen.get(worker_id, 0.0) > limit
            if silent and not link.registrations and self._store.up and worker_id not in known:
                await self._drop(worker_id)

    async def _check(self, info: WorkerInfo) -> None:
        if not info.worker_id or not info.address:
            raise InvalidRequest.of("worker", info.worker_id or info.address, "given with a worker_id and an address")
        if info.role is Role.VERIFIER:
            await self._check_verifier(info)
        else:
            self._check_drafter(info)

    def _check_drafter(self, info: WorkerInfo) -> None:
        if self._target is None:
            return
        name, target = info.model.name, self._target.info
        if self.vocabulary_differs(info):
            raise ModelMismatch(f"drafter {name} has another vocabulary than target {target.name}")
        if info.model.target_digest not in ("", target.weights_digest):
            raise ModelMismatch(
                f"drafter {name} was trained for another target than {target.name}: it would guess nonsense. Train one "
                "for this target with `outrider train`",
                field="model.made_for",
                value=info.model.target_digest,
                limit=target.weights_digest,
            )

    async def _check_verifier(self, info: WorkerInfo) -> None:
        async with self._target_lock:
            known = self._target
            if known is not None and known.info.fingerprint == info.model.fingerprint:
                return
            if known is not None and any(self._of(Role.VERIFIER)):
                raise _target_mismatch(known, info)
            async with self._fleet.access(Role.VERIFIER).aio_channel(info.address) as channel:
                stub: verifier_pb2_grpc.VerifierAsyncStub = verifier_pb2_grpc.VerifierStub(channel)  # type: ignore[assignment]
                try:
                    self._target = await fetch_target(info.model, stub)
                except grpc.aio.AioRpcError as error:
                    raise worker_error(info.address, error) from error
            self._target_known(self._target.info)
            log.info("target known", model=info.model.name, fingerprint=info.model.fingerprint)
            for link in self._of(Role.DRAFTER):
                try:
                    self._check_drafter(link.info)
                except ModelMismatch as error:
                    log.warning("drafter sent away", worker=link.info.worker_id, error=error.message)
                    await self._drop(link.info.worker_id)

    async def _put(self, info: WorkerInfo) -> WorkerConnection:
        known = self._links.get(info.worker_id)
        if known is not None and identity(known.info) == identity(info):
            # The same worker again: sessions that hold its link must hear what it says from now on.
            known.info = replace(info, load=_fresher(known.info.load, info.load))
            return known
        if (known := self._returned(info)) is not None:
            return known
        await self._drop(info.worker_id)
        for link in self.links():
            if _place(link.info) == _place(info):
                await self._drop(link.info.worker_id)  # restarted in the same place
        return self._join(WorkerConnection(info, lambda: self._fleet.access(info.role)))

    def _join(self, link: WorkerConnection) -> WorkerConnection:
        info = link.info
        self._links[info.worker_id] = link
        self._changed.set()
        log.info("worker joined", worker=info.worker_id, role=info.role.name.lower(), address=info.address)
        return link

    def _returned(self, info: WorkerInfo) -> WorkerConnection | None:
        """Return the connection of a worker whose registration broke off while sessions of ours went on with it.

        They hear what it says from now on, and it counts them.
        """
        link = self._unregistered.get(info.worker_id)
        if link is None or identity(link.info) != identity(info):
            return None
        del self._unregistered[info.worker_id]
        link.info = replace(info, load=_fresher(link.info.load, info.load))
        return self._join(link)

    async def _drop(self, worker_id: str) -> None:
        """Forget a worker. Streams of sessions end with the worker, not with its registration."""
        link = self._links.pop(worker_id, None)
        self._seen.pop(worker_id, None)
        if link is None:
            return
        log.info("worker left", worker=worker_id)
        if link.streams:
            older, self._unregistered[worker_id] = self._unregistered.get(worker_id), link
            link = older
        if link is not None:
            await link.close()

    async def _close_unused(self, *, every: bool = False) -> None:
        for worker_id, link in list(self._unregistered.items()):
            if every or not link.streams:
                del self._unregistered[worker_id]
                await link.close()

    def _of(self, role: Role) -> list[WorkerConnection]:
        return [link for link in self._links.values() if link.info.role is role]


def identity(info: WorkerInfo) -> WorkerInfo:
    """What a worker stays from its first word to its last: all but how it is doing and how much it takes."""
    return replace(info, load=WorkerLoad(), draining=False, round_trip_ms=0.0, capacity=1)


def _place(info: WorkerInfo) -> tuple[str, Role]:
    return info.address, info.role


def _fresher(probed: WorkerLoad, reported: WorkerLoad) -> WorkerLoad:
    """Probes are newer than heartbeats; before the first probe there is only the report."""
    return reported if probed == WorkerLoad() else probed


def _target_mismatch(known: Target, info: WorkerInfo) -> ModelMismatch:
    ours, theirs = known.info, info.model
    for name in ("architecture", "vocab_size", "vocabulary_digest", "dtype", "parameters", "fingerprint"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return ModelMismatch(
                f"verifier {info.worker_id} serves {theirs.name}, the others {ours.name}; first difference: "
                f"{name} is {other}, must be {mine}",
                field=f"model.{name}",
                value=other,
                limit=mine,
            )
    return ModelMismatch(f"verifier {info.worker_id} serves another target")
