"""gRPC service for engines with clients of their own: guesses for their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from coordinator.attachment.session import AttachedSession
from coordinator.sessions.session_manager import SessionManager
from outrider.base.aio import Call, background, first_message
from outrider.observability.request_context import bind_context
from outrider.protocol.errors import InvalidRequest, ModelMismatch, Unavailable
from outrider.security.tenants import tenant
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify


class AttachmentService(rpc.AttachmentServicer):
    """Service that attaches drafters to the requests of engines."""

    def __init__(self, sessions: SessionManager, settings: CoordinatorSettings) -> None:
        self._sessions = sessions
        self._settings = settings
        self._outboxes: list[asyncio.Queue[verify.VerifyRequest | None]] = []  # None: the end

    def stop(self) -> None:
        """End all streams, so that engines attach to another coordinator."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: Call
    ) -> AsyncIterator[verify.VerifyRequest]:
        bind_context(context.invocation_metadata() or (), first=True)
        holder = tenant().id
        first = await first_message(requests, self._settings.open_timeout_s, "open")
        with self._sessions.metrics.count_refusals():
            session = self._open(first)
        self._sessions.attached.append(holder)
        self._outboxes.append(outbox := session.outbox)
        try:
            async with background(session.follow(requests)) as (following,):
                following.add_done_callback(lambda _: outbox.put_nowait(None))
                while (message := await outbox.get()) is not None:
                    yield message
                if not following.done():
                    raise Unavailable("this coordinator is shutting down; attach to another", retry_after_ms=500)
                following.result()
        finally:
            self._sessions.attached.remove(holder)
            self._outboxes.remove(outbox)

    def _open(self, request: pb.AttachRequest) -> AttachedSession:
        if request.WhichOneof("message") != "open":
            raise InvalidRequest.of("message", request.WhichOneof("message") or "empty", "open")
        targets = [target.info for target in self._sessions.targets]
        theirs = request.open.model.vocabulary_digest
        if targets and theirs not in (known := [target.vocabulary_digest for target in targets]):
            names = ", ".join(target.name for target in targets)
            message = f"the engine's vocabulary is not that of {names}, which this coordinator's drafters serve"
            raise ModelMismatch(message, field="open.model.vocabulary_digest", value=theirs, limit=", ".join(known))
        given = request.open.cache_salt
        salt = given if self._settings.share_prefixes else tenant().salt(given)
        session = AttachedSession(request.open, salt, tenant().id, self._sessions.drafting, self._sessions.metrics)
        self._sessions.admit(request.open.prompt_length)
        return session
