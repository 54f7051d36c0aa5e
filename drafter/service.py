"""gRPC service of the drafter: committed tokens in, guesses out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from drafter.grammar import GrammarCursor, TargetGrammars
from drafter.hidden_states.declaration import StateDeclaration
from drafter.interface import Drafter
from drafter.loop import DraftingLoop
from drafter.methods.registry import make
from drafter.session import DraftOpening, DraftSession
from outrider.base.aio import background, first_message
from outrider.multiplex.direct_call import Context, DirectCall
from outrider.observability.metrics import DrafterMetrics
from outrider.observability.request_context import bind_context
from outrider.observability.span_events import StreamSpan
from outrider.observability.tracing import OFF, Tracing, make_tracing
from outrider.protocol import convert, message_limits
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import Role, WorkerInfo
from outrider.runtime.worker_service import WorkerService
from outrider.settings.drafter import DrafterSettings
from outrider.speculation.direct import VerifierBeside
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc as rpc


class DrafterService(WorkerService, StateDeclaration, rpc.DrafterServicer):
    names = ("outrider.v1.Drafter",)
    work = "drafting"

    def __init__(
        self, drafter: Drafter, settings: DrafterSettings, tracing: Tracing = OFF, beside: VerifierBeside | None = None
    ) -> None:
        """Prepare the service; `beside` is the verifier in this process, if any."""
        self._drafter = drafter
        self._settings = settings
        self._metrics = DrafterMetrics(drafter.info.name, settings.kind)
        self._loop = DraftingLoop(drafter, settings.max_sessions, self._metrics, beside)
        self._grammars = TargetGrammars(settings)
        about = WorkerInfo("", Role.DRAFTER, "", drafter.info, settings.kind, hidden_states=drafter.needs_hidden_states)
        about = self.declare(about, drafter, settings)
        call = (self.Draft, pb.DraftRequest.FromString)
        super().__init__(settings, about, drafter.vocabulary, self._loop, self._metrics, tracing, *call)

    def add_to(self, server: grpc.aio.Server) -> None:
        rpc.add_DrafterServicer_to_server(self, server)  # type: ignore[no-untyped-call,unused-ignore]

    async def Draft(self, requests: AsyncIterator[pb.DraftRequest], context: Context) -> AsyncIterator[pb.DraftReply]:
        request_context = bind_context(context.invocation_metadata() or ())
        with self._metrics.count_refusals():
            first = await first_message(requests, self._settings.open_timeout_s, "open")
            opening = convert.opening_from_proto(DraftOpening, first)
            session = self._loop.open(opening, await self._grammar_cursor(opening))
        try:
            with StreamSpan(self._tracing, "draft", request_context, session.id) as span:
                session.record = lambda guess: span.add(len(guess.tokens), guess.draft_us)
                yield pb.DraftReply(opened=pb.DraftOpened(hidden_states=self._drafter.needs_hidden_states))
                if isinstance(context, DirectCall) and session.send is None:
                    session.ready = context.ready
                    session.send = lambda guess: context.send(pb.DraftReply(guess=convert.guess_to_proto(guess)))
                async with background(self._receive(session, requests, context, partial(_apply, session))):
                    async for guess in session.messages():
                        yield pb.DraftReply(guess=convert.guess_to_proto(guess))
                if session.error is not None:
                    raise session.error
        finally:
            self._loop.close(session)

    async def _grammar_cursor(self, opening: DraftOpening) -> GrammarCursor | None:
        """Return the grammar cursor at the end of the session's output."""
        if opening.params.grammar is None:
            return None
        opening.check()
        return await self._grammars.cursor(
            opening.params, opening.tokens, opening.prompt_length, opening.vocabulary_digest, opening.eos_token_ids
        )


def prepared(
    settings: DrafterSettings, progress: Callable[[str], None], beside: VerifierBeside | None = None
) -> DrafterService:
    """Make a drafter from its settings, and its service."""
    tracing = make_tracing(settings.otlp_endpoint, "drafter")
    progress(f"preparing the {settings.kind} drafter")
    return DrafterService(make(settings, progress), settings, tracing, beside)


def _apply(session: DraftSession, request: pb.DraftRequest) -> None:
    """Apply a commit or steering message; an invalid one ends the session, since its state is then unknown."""
    message_limits.check_draft_request(request)
    kind = request.WhichOneof("message")
    if kind == "committed":
        committed = request.committed
        given = committed.HasField("hidden_states")
        hidden_states = convert.hidden_states_from_proto(committed.hidden_states) if given else None
        session.commit(committed.position, tuple(committed.tokens), hidden_states)
    elif kind == "earlier_states":
        session.hidden_states.add_earlier(convert.hidden_states_from_proto(request.earlier_states))
    elif kind == "steer":
        session.steer(convert.draft_steering_from_proto(request.steer))
    else:
        raise InvalidRequest.of("message", kind or "empty", "committed or steer once the stream is open")
