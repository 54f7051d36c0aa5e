"""gRPC service for clients. Workers register with `registry_service`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import grpc
import structlog

from coordinator.admission.byte_budget import ByteBudget
from coordinator.admission.waiting.urgency import set_urgency, urgency
from coordinator.api.gauges import connect_gauges
from coordinator.api.http.app import Api
from coordinator.api.http.server import HttpServer
from coordinator.api.preprocess import ClientRequest, Input, admission, one_system, prepare
from coordinator.api.registry_service import RegistryService
from coordinator.api.whole_messages import WholeMessages
from coordinator.attachment.service import AttachmentService
from coordinator.persistence.idempotency import digest_of
from coordinator.persistence.session_record import SpeculationOptions
from coordinator.sessions.output import Token, follow
from coordinator.sessions.session import Session
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.chat_template import Chat
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target
from outrider.base.aio import Call, beside
from outrider.observability.request_context import REQUEST_ID, bind_context
from outrider.protocol import convert
from outrider.protocol.errors import OutriderError
from outrider.protocol.fieldwise import from_plain
from outrider.security.auth_interceptor import REFLECTION, AuthInterceptor
from outrider.security.credentials import Credentials
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify

log = structlog.get_logger(__name__)

CLIENTS = "outrider.v1.Outrider"
REGISTRY = "outrider.v1.Registry"
ATTACHMENT = "outrider.v1.Attachment"
_MIB = 1024 * 1024
Replies = AsyncGenerator[pb.GenerateReply, None]


class CoordinatorService(rpc.OutriderServicer):
    """Service that clients call, with the HTTP server and the registry of the same process."""

    names: tuple[str, ...] = (CLIENTS, REGISTRY, ATTACHMENT)

    def __init__(self, settings: CoordinatorSettings, redis_url: str) -> None:
        self._settings = settings
        self.credentials = Credentials(settings)
        self.api_keys = self.credentials.keys["api_keys"]
        self.fleet = FleetKeys.of(self.credentials)
        # The drafter key allows only registration.
        registering = self.fleet.verifiers | self.fleet.drafters
        allowed = {CLIENTS: self.api_keys, ATTACHMENT: self.api_keys, REGISTRY: registering}
        if not self.api_keys:
            allowed |= dict.fromkeys(REFLECTION, self.api_keys)  # it describes what every client may call
        self.auth_interceptor = AuthInterceptor(allowed, others=self.api_keys | self.fleet.verifiers)
        self.sessions = SessionManager(settings, redis_url, self.fleet, lambda: self.api_keys.num_holders > 1)
        connect_gauges(self.sessions)
        self._registry = RegistryService(self.sessions, settings, self.fleet)
        self._attachment = AttachmentService(self.sessions, settings)
        budget = ByteBudget(_MIB * settings.max_bodies_mib, self.sessions.metrics.count_refusals)
        largest = _MIB * settings.max_message_mib
        self.interceptors = (WholeMessages(budget, largest, settings.open_timeout_s, REGISTRY, first=ATTACHMENT),)
        self._http = None
        if settings.http_port >= 0:
            app = Api(self.sessions, settings, self.api_keys, budget).app()
            self._http = HttpServer(app, settings, self.credentials)

    # Lifecycle.

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_OutriderServicer_to_server(self, server)  # type: ignore[no-untyped-call,unused-ignore]
        rpc.add_RegistryServicer_to_server(self._registry, server)  # type: ignore[no-untyped-call,unused-ignore]
        rpc.add_AttachmentServicer_to_server(self._attachment, server)  # type: ignore[no-untyped-call,unused-ignore]

    async def start(self, port: int) -> None:
        self.sessions.start()
        if self._http is not None:
            await self._http.start()
            log.info("serving HTTP", address=self._http.address)

    @property
    def http_address(self) -> str:
        """Return the HTTP address, empty without HTTP."""
        return "" if self._http is None else self._http.address

    def drain(self) -> None:
        self._attachment.stop()
        self.sessions.drain()

    def busy(self) -> bool:
        return bool(self.sessions.live)

    def ready(self) -> bool:
        return self.sessions.ready

    async def stop(self) -> None:
        self._registry.stop()
        await self.sessions.stop()
        if self._http is not None:
            await self._http.stop()

    # Client calls.

    async def Generate(self, request: pb.GenerateRequest, context: Call) -> AsyncIterator[pb.GenerateReply]:
        async with _logged("Generate", context, session_id="") as call:
            with admission(self.sessions.metrics):
                set_urgency(request.priority if request.HasField("priority") else None, context.time_remaining())
                target = await self.sessions.targets.find(request.model, urgency().remaining_s)
                size = request.ByteSize()
                prepared = await prepare(from_proto(request, target), size, target, self._settings)
                if key := request.idempotency_key:
                    sent = await beside(size, lambda it: digest_of(it.SerializeToString(deterministic=True)), request)
                    prepared = replace(prepared, sent=sent)
                session = await self.sessions.begin(prepared, target, key)
            call["session_id"] = session.record.session_id
            del request  # see `WholeMessages`
            async with contextlib.aclosing(self._stream(session, 0, context, call)) as replies:
                async for reply in replies:
                    yield reply

    async def Resume(self, request: pb.ResumeRequest, context: Call) -> AsyncIterator[pb.GenerateReply]:
        async with _logged("Resume", context, session_id=request.session_id) as call:
            with admission(self.sessions.metrics):
                session = await self.sessions.take_over(request.session_id, request.from_position, request.tail)
            async with contextlib.aclosing(self._stream(session, request.from_position, context, call)) as replies:
                del request
                async for reply in replies:
                    yield reply

    async def Cancel(self, request: pb.CancelRequest, context: Call) -> pb.CancelReply:
        async with _logged("Cancel", context, session_id=request.session_id):
            return pb.CancelReply(cancelled=await self.sessions.cancel(request.session_id))

    async def GetModelInfo(self, request: common.GetModelInfoRequest, context: Call) -> common.ModelInfo:
        return convert.model_to_proto((await self.sessions.targets.find(request.model)).info)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Call) -> pb.ServerInfo:
        return convert.server_info_to_proto(await self.sessions.info())

    async def _stream(self, session: Session, start: int, context: Call, call: dict[str, str]) -> Replies:
        record = session.record
        assert record.request.params.seed is not None
        with self.sessions.followed(session):
            await session.opened()
            await context.send_initial_metadata(context.trailing_metadata())
            named = {"session_id": record.session_id, "model": session.target.info.name}
            started = pb.Started(**named, seed=record.request.params.seed, prompt_tokens=len(record.request.prompt))
            yield pb.GenerateReply(started=started)
            async with contextlib.aclosing(follow([session.output], start)) as updates:
                async for _, position, tokens in updates:
                    if tokens:
                        yield pb.GenerateReply(chunk=_chunk(position, tokens))
            call["status"] = "OK"  # all was sent: a client may cancel a call whose last message it has, or not read it
            if session.error is not None:
                yield pb.GenerateReply(error=convert.error_to_proto(session.error))
            else:
                yield pb.GenerateReply(complete=_complete(session))


def from_proto(request: pb.GenerateRequest, target: Target) -> ClientRequest:
    messages = [{"role": it.role.replace("developer", "system"), "content": it.content} for it in request.chat.messages]
    chat = Chat(one_system(messages, target))
    inputs: dict[str, Input] = {"prompt": request.prompt, "chat": chat, "tokens": request.tokens.ids}
    return ClientRequest(
        params=convert.params_from_proto(request.params),
        input=inputs.get(request.WhichOneof("input") or ""),
        speculation=from_plain(SpeculationOptions, convert.present_fields(request.speculation)),
        cache_salt=request.cache_salt,
        max_tokens_given=request.params.HasField("max_tokens"),
    )


@contextlib.asynccontextmanager
async def _logged(method: str, context: Call, **about: str) -> AsyncIterator[dict[str, str]]:
    """Send the request id, given or new; log the end of a call with what is known of it by then, as the HTTP API."""
    request_context = bind_context(context.invocation_metadata() or (), first=True)
    context.set_trailing_metadata(((REQUEST_ID, request_context.request_id),))  # leading ones would end gRPC's retries
    about["status"], started = "CANCELLED", time.monotonic()
    try:
        yield about
        about["status"] = "OK"
    except Exception as error:
        about["status"] = (error if isinstance(error, OutriderError) else OutriderError).grpc_status
        raise
    finally:
        about["status"] = code.name if (code := context.code()) else about["status"]  # set for replies not read in time
        log.info("grpc", method=method, ms=round(1000 * (time.monotonic() - started)), **about)


def _chunk(position: int, tokens: list[Token]) -> pb.Chunk:
    ids, kinds, texts, logprobs, _ = zip(*tokens, strict=True)
    return pb.Chunk(
        position=position,
        text="".join(texts),
        token_ids=ids,
        kinds=kinds,
        logprobs=() if None in logprobs else map(convert.logprobs_to_proto, logprobs),
        characters=map(len, texts),
    )


def _complete(session: Session) -> pb.Complete:
    record = session.record
    return pb.Complete(
        finish_reason=verify.FinishReason.ValueType(record.finish_reason),
        text=session.output.rest.text,
        stop=session.output.rest.stop,
        prompt_tokens=len(record.request.prompt),
        output_tokens=len(record.tokens),
        stats=convert.stats_to_proto(session.stats.values(considered=True)),
    )
