"""Fake workers: they register with a valid key and send invalid answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import multiplex_pb2 as multiplex
from outrider.v1 import verifier_pb2 as verify
from tests.fuzz import corpus
from tests.fuzz.calls import ANSWER_S, Outcome, call
from tests.fuzz.case import CANCEL, Case
from tests.fuzz.corpus import Known
from tests.fuzz.generators import DRAFT, PUBLIC, VERIFY
from tests.fuzz.shared import SESSIONS

PATIENCE_US = 4_000  # that the real verifier waits for a fake drafter's guesses
ROOMY = 2**20  # capacity; the largest is chosen first


class FalseWorker(grpc.GenericRpcHandler):
    """Fake worker that restarts at a new address each time, since the coordinator avoids a failed address."""

    def __init__(self, number: int) -> None:
        self.kind = f"fuzz{number}"
        self.served = 0  # assigned sessions
        self._case: Case | None = None
        self._lives = 0

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method in (VERIFY, DRAFT):
            return grpc.stream_stream_rpc_method_handler(self._session)
        case = self._case
        if method.endswith("/Sessions") and case is not None and SESSIONS in case.answers:
            return grpc.stream_stream_rpc_method_handler(self._shared)
        if method.endswith("/Probe"):
            return grpc.unary_unary_rpc_method_handler(self._probe)
        return None

    async def _probe(self, request: bytes, context: Any) -> bytes:
        said = self._case.answers.get("Probe", ()) if self._case is not None else ()
        return said[0] if said else b""

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        first = await anext(requests, b"")
        case = self._case
        if case is None or (case.method == VERIFY and not _is_ours(first)):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
            return
        self.served += 1
        for answer in case.answers.get(case.method, ()):
            yield answer
        if case.method == DRAFT:  # an ended one would be replaced by itself
            async for _ in requests:
                pass

    async def _shared(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Answer the first session of a shared stream. It is the first there, as each life has its own address."""
        case = self._case
        said = case.answers.get(SESSIONS, (b"",)) if case is not None else (b"",)
        yield said[0]
        async for batch in requests:
            first = next(
                (frame.payload for frame in multiplex.SessionFrames.FromString(batch).frames if frame.payload), b""
            )
            if not first:
                continue
            if case is None or (case.method == VERIFY and not _is_ours(first)):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
            self.served += 1
            for answer in said[1:]:
                yield answer
            break
        async for _ in requests:
            pass

    @asynccontextmanager
    async def playing(self, case: Case, known: Known, coordinator: grpc.aio.Channel) -> AsyncIterator[bool]:
        """Register for the duration of the block; yield whether it was accepted."""
        self._case = case
        self._lives += 1
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        role = pb.ROLE_VERIFIER if case.method == VERIFY else pb.ROLE_DRAFTER
        worker = corpus.workers(known, role, address)[0]
        worker.worker_id, worker.kind, worker.capacity = f"{self.kind}-{self._lives}", self.kind, ROOMY
        worker.load.Clear()
        if role == pb.ROLE_DRAFTER:
            worker.model.fingerprint = self.kind
        stream: Any = rpc.RegistryStub(coordinator).Register()
        try:
            await stream.write(pb.RegisterRequest(worker=worker))
            async with asyncio.timeout(ANSWER_S):
                reply = await stream.read()
            yield reply is not grpc.aio.EOF and reply.WhichOneof("message") == "accepted"
        finally:
            stream.cancel()
            self._case = None
            await server.stop(0)


def _is_ours(first: bytes) -> bool:
    """Return whether the session is for fake workers; others go to the real verifier."""
    opening = verify.VerifyRequest.FromString(first).open
    return list(opening.tokens[: len(corpus.LURE)]) == corpus.LURE


class Stage:
    """Slots for fake workers: one verifier at a time, since a session goes to any with capacity."""

    def __init__(self, known: Known, drafters: int) -> None:
        self._known = known
        self._verifier = FalseWorker(0)
        self._drafters: asyncio.Queue[FalseWorker] = asyncio.Queue()
        self._workers = [self._verifier, *(FalseWorker(i + 1) for i in range(drafters))]
        for worker in self._workers[1:]:
            self._drafters.put_nowait(worker)
        self._turn = asyncio.Lock()
        self._true: dict[bytes, tuple[list[int], bool]] = {}  # by request: tokens, and whether these are all

    @property
    def served(self) -> int:
        return sum(worker.served for worker in self._workers)

    async def play(self, case: Case, coordinator: grpc.aio.Channel) -> Outcome:
        if case.method == VERIFY:
            async with self._turn:
                return await self._beside(self._verifier, case, coordinator, case.messages[0])
        worker = await self._drafters.get()
        try:
            request = pb.GenerateRequest.FromString(case.messages[0])
            request.ClearField("idempotency_key")
            request.speculation.gamma = 0
            request.speculation.drafter = ""
            alone = request.SerializeToString(deterministic=True)
            request.speculation.gamma, request.speculation.patience_us = 4, PATIENCE_US
            request.speculation.drafter = worker.kind
            outcome = await self._beside(worker, case, coordinator, request.SerializeToString())
            if not outcome.problem and outcome.result == "OK" and request.params.verification in (0, 1, 2):
                await self._compare(alone, outcome, coordinator)
            return outcome
        finally:
            self._drafters.put_nowait(worker)

    async def _beside(self, worker: FalseWorker, case: Case, coordinator: grpc.aio.Channel, request: bytes) -> Outcome:
        try:
            async with worker.playing(case, self._known, coordinator) as accepted:
                if not accepted:
                    return Outcome(problem="an honest registration was not accepted")
                return await call(coordinator, PUBLIC + "Generate", (request,), CANCEL)
        except TimeoutError:
            return Outcome(problem=f"no answer to a registration in {ANSWER_S:g} s", late=True)

    async def _compare(self, alone: bytes, outcome: Outcome, coordinator: grpc.aio.Channel) -> None:
        """Check that a drafter has not changed a text."""
        if alone not in self._true:
            read = await call(coordinator, PUBLIC + "Generate", (alone,), CANCEL)
            self._true[alone] = _tokens(read), read.result == "OK"
        (true, whole), got = self._true[alone], _tokens(outcome)
        if got != true and (whole or got[: len(true)] != true):
            outcome.problem = f"a drafter changed the text: {got}, not {true}"


def _tokens(outcome: Outcome) -> list[int]:
    replies = [pb.GenerateReply.FromString(reply) for reply in outcome.replies]
    return [token for reply in replies for token in reply.chunk.token_ids]
