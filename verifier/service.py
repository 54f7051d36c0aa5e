"""gRPC service of the verifier: guesses in, verdicts out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc

from outrider.base.aio import Call, background, first_message
from outrider.base.config import KV_TOKENS
from outrider.multiplex.direct_call import Context, DirectCall
from outrider.observability.metrics import VerifierMetrics
from outrider.observability.request_context import bind_context
from outrider.observability.span_events import StreamSpan
from outrider.observability.tracing import OFF, Tracing
from outrider.protocol import convert, message_limits
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.protocol.hidden_states.earlier_states import EarlierStates
from outrider.protocol.speculation import Verdict
from outrider.protocol.vocabulary import Vocabulary
from outrider.runtime.worker_service import WorkerService
from outrider.settings.verifier import VerifierSettings
from outrider.speculation.grammar import GrammarCompiler, GrammarMatcher
from outrider.v1 import verifier_pb2 as pb
from outrider.v1 import verifier_pb2_grpc as rpc
from verifier.hidden_states.earlier_states import earlier_states
from verifier.hidden_states.projections import ProjectionService
from verifier.loop import VerificationLoop
from verifier.session import Ended, Rejection, VerifyOpening, VerifySession
from verifier.target import VerifyTarget

PEER_CLOSE_TIMEOUT_S = 30.0  # a busy peer may be seconds late in reading its replies
_FILE_CHUNK = 1024 * 1024


class VerifierService(WorkerService, ProjectionService, rpc.VerifierServicer):
    names = ("outrider.v1.Verifier",)
    work = "verification"

    def __init__(
        self,
        target: VerifyTarget,
        vocabulary: Vocabulary,
        tokenizer_files: dict[str, Path],
        settings: VerifierSettings,
        cost: CostCurve = UNKNOWN_COST,
        tracing: Tracing = OFF,
    ) -> None:
        self._target = target
        self._settings = settings
        self._tokenizer_files = {name: path.read_bytes() for name, path in tokenizer_files.items()}
        info = replace(target.info, name=settings.served_model_name or target.info.name)
        self._metrics = VerifierMetrics(info.name)
        limits = settings.model_copy(update={"kv_tokens": settings.kv_tokens or KV_TOKENS})
        self.loop = VerificationLoop(target, limits, self._metrics, cost)
        self._grammars = GrammarCompiler(self._tokenizer, target.info.eos_token_ids)
        self.projections = target.projections
        about = WorkerInfo("", Role.VERIFIER, "", info, "target")
        about = replace(about, state_layers=self.projections.num_layers, state_width=self.projections.width)
        call = (self.Verify, pb.VerifyRequest.FromString)
        super().__init__(settings, about, vocabulary, self.loop, self._metrics, tracing, *call)

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_VerifierServicer_to_server(self, server)  # type: ignore[no-untyped-call,unused-ignore]

    async def Verify(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Context
    ) -> AsyncIterator[pb.VerifyReply]:
        request_context = bind_context(context.invocation_metadata() or ())
        with self._metrics.count_refusals():
            first = await first_message(requests, self._settings.open_timeout_s, "open")
            opening = convert.opening_from_proto(VerifyOpening, first)
            session = self.loop.open(opening, await self._guide(opening))
            self._refuse_states(session)
        try:
            with StreamSpan(self._tracing, "verify", request_context, session.id) as span:
                model = convert.model_to_proto(self._target.info)
                yield pb.VerifyReply(opened=pb.Opened(position=len(session.committed), model=model))

                def message(verdict: Verdict) -> pb.VerifyReply:
                    times = verdict.timings
                    span.add(len(verdict.tokens), times.step_us, times.cached_tokens, verdict.steps)
                    return pb.VerifyReply(verdict=convert.verdict_to_proto(verdict))

                if isinstance(context, DirectCall):
                    session.peer, session.send = context, lambda verdict: context.send(message(verdict))
                async with background(
                    self._receive(session, requests, context, partial(self._apply, session))
                ) as receiving:
                    while not isinstance(reply := await session.next_reply(), Ended):
                        if session.resume_after_read():
                            self.loop.wake()
                        if isinstance(reply, Rejection):
                            yield pb.VerifyReply(refused=convert.error_to_proto(reply.error), source=reply.source)
                        elif isinstance(reply, EarlierStates):
                            yield pb.VerifyReply(earlier_states=earlier_states(session.hidden_states, reply))
                        else:
                            yield message(reply)
                    if reply.error is not None:
                        # Do not wait here: a peer learns of an error from the status, so it would not close first.
                        # Verdicts that gRPC drops unread cost time, no tokens: the session is opened again with the
                        # tokens that were read.
                        raise reply.error
                    # Wait for the peer to close first: otherwise a guess that it sends meanwhile would fail, and gRPC
                    # would end its stream and drop the verdicts that it has not read yet.
                    await asyncio.wait(receiving, timeout=PEER_CLOSE_TIMEOUT_S)
        finally:
            self.loop.close(session)

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Call) -> AsyncIterator[pb.FileChunk]:
        for name, data in self._tokenizer_files.items():
            for start in range(0, len(data), _FILE_CHUNK):
                yield pb.FileChunk(name=name, data=data[start : start + _FILE_CHUNK])

    async def _guide(self, opening: VerifyOpening) -> GrammarMatcher | None:
        """Return the grammar state at the end of the session's output."""
        if opening.params.grammar is None:
            return None
        opening.check(self._target.info)
        return await self._grammars.compile_async(opening.params, opening.tokens[opening.prompt_length :])

    def _apply(self, session: VerifySession, request: pb.VerifyRequest) -> None:
        """Apply a guess or steering message, or reject it as invalid."""
        message_limits.check_verify_request(request)
        try:
            kind = request.WhichOneof("message")
            if kind == "guess":
                session.add_guess(convert.guess_from_proto(request.guess))
            elif kind == "steer":
                session.steer(convert.verify_steering_from_proto(request.steer))
                if request.steer.HasField("states"):
                    self._refuse_states(session)
            else:
                raise InvalidRequest.of("message", kind or "empty", "guess or steer once the stream is open")
        except InvalidRequest as error:
            self.loop.reject(session, error, request.guess.source)

    def _refuse_states(self, session: VerifySession) -> None:
        for error in session.hidden_states.refuse(self.projections.check):
            session.reject(error, 0)

    def _tokenizer(self) -> str:
        if (data := self._tokenizer_files.get("tokenizer.json")) is None:
            raise OSError("no tokenizer.json")
        return data.decode()
