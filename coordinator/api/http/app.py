"""HTTP application: routes and their handlers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coordinator.admission.byte_budget import ByteBudget
from coordinator.admission.model_limits import limits_of
from coordinator.admission.waiting.urgency import TIMEOUT_HEADER, set_urgency, timeout_of, urgency
from coordinator.api.http import pages
from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.prompt_logprobs import echoed_prompts
from coordinator.api.http.agents.replies import plan_chat
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.agents.response_events import ResponseReplies, plan_response
from coordinator.api.http.agents.tokenize import TokensApi
from coordinator.api.http.answer import requests_of, start_answer
from coordinator.api.http.bodies import CompletionBody, read_body
from coordinator.api.http.failures import on_http_error, on_outrider_error, respond
from coordinator.api.http.hosts import RequestChecks, hosts_of
from coordinator.api.http.limits import BodyReader, KeyAuth, RequestIds
from coordinator.api.http.messages.replies import MessageReplies
from coordinator.api.http.messages.routes import MessagesApi, MessagesShape
from coordinator.api.http.openapi import document
from coordinator.api.http.replies import Replies, plan_completion
from coordinator.api.http.responses import Fleet, Model, ModelList, Status
from coordinator.api.http.streams import EventStream, WholeAnswer
from coordinator.api.preprocess import ClientRequest, admission
from coordinator.persistence.idempotency import MAX_KEY_CHARACTERS
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.target import Target
from outrider.base.aio import LARGE_BYTES, beside
from outrider.protocol.errors import InvalidRequest, OutriderError, Unavailable
from outrider.security.api_keys import ApiKeys
from outrider.settings.coordinator import CoordinatorSettings

Plan = Callable[..., tuple[list[ClientRequest], Replies[Any] | ResponseReplies | MessageReplies]]

_CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["x-request-id", "request-id", "retry-after"],
}
_KEY = re.compile(f"[!-~]{{0,{MAX_KEY_CHARACTERS}}}")


class Api:
    """Handlers of the HTTP API."""

    def __init__(
        self, sessions: SessionManager, settings: CoordinatorSettings, keys: ApiKeys, budget: ByteBudget
    ) -> None:
        self._budget = budget
        self._sessions = sessions
        self._settings = settings
        self._keys = keys

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            *MessagesApi(self._generate, self._sessions, self._settings).routes(),
            *TokensApi(self._sessions, self._settings).routes(),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/fleet", self.fleet),
            Route("/metrics", self.metrics),
            Route("/health", JSONResponse(Status(status="ok")), methods=["GET"]),
            Route("/ready", self.ready),
            Route("/openapi.json", JSONResponse(document()), methods=["GET"]),
            *pages.routes(),
        ]
        origins = [it for each in self._settings.cors_origins.split(",") if (it := each.strip().rstrip("/").lower())]
        allowed = [name.strip() for name in self._settings.allowed_hosts.split(",") if name.strip()]
        open_to_all = _OPEN | {"/metrics"} if self._settings.open_metrics else _OPEN
        limit = 3 * 1024 * self._settings.max_prompt_kib  # a text may be longer as JSON
        app = Starlette(
            routes=routes,
            middleware=[
                *([Middleware(CORSMiddleware, allow_origins=origins, **_CORS)] if origins else []),
                Middleware(MessagesShape),
                Middleware(RequestIds),
                Middleware(RequestChecks, hosts=hosts_of(self._settings.host, allowed), origins=frozenset(origins)),
                Middleware(KeyAuth, keys=self._keys, open_to_all=open_to_all),
                Middleware(BodyReader, limit=limit, timeout_s=self._settings.open_timeout_s, budget=self._budget),
            ],
            exception_handlers={OutriderError: on_outrider_error, HTTPException: on_http_error},
        )
        app.router.redirect_slashes = False  # a redirect would name the Host header's host
        return app

    # Generation.

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, await read_body(request, ChatBody), plan_chat)

    async def respond(self, request: Request) -> Response:
        bodies = [await read_body(request, ResponsesBody)]  # not kept as long as the answer takes
        request.state.to_plan += LARGE_BYTES * (bodies[0].truncation == "auto")  # what fits takes several encodings
        return await self._generate(request, bodies[0].chat, lambda *given: plan_response(bodies.pop(), *given))

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, await read_body(request, CompletionBody), plan_completion)

    async def _generate(self, request: Request, body: ChatBody | CompletionBody, plan: Plan) -> Response:
        with admission(self._sessions.metrics):
            set_urgency(body.priority, timeout_of(request.headers.get(TIMEOUT_HEADER)))
            target = await self._sessions.targets.find(body.model, urgency().remaining_s)
            inputs, replies = await beside(request.state.to_plan, plan, body, target, self._settings)
            requests = await requests_of(body, request.state.size, inputs, target, self._settings)
            sent = request.state.sent and request.state.sent + inputs[0].form
            requests = [replace(each, sent=sent) for each in requests]
        if isinstance(replies, Replies):
            replies.prompts = await echoed_prompts(body, self._sessions, requests, target, _key(request))
        answering, stream = start_answer(self._sessions, requests, target, _key(request)), body.stream
        del body, inputs  # not to be kept as long as the answer takes
        if stream:
            return await EventStream.start(replies.chunks(answering), typed=not isinstance(replies, Replies))
        return cast(Response, await replies.whole(answering, WholeAnswer))

    # Information.

    async def models(self, request: Request) -> Response:
        self._sessions.targets.check_any()
        data = [self._model(name, target) for name, target in self._sessions.targets.listed().items()]
        return JSONResponse(ModelList(object="list", data=data))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"] or "/"  # the empty name would be the default model's
        return JSONResponse(self._model(name, await self._sessions.targets.find(name)))

    def _model(self, name: str, target: Target) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": int(_STARTED),
            "owned_by": "outrider",
            "root": target.info.name,
            "max_model_len": limits_of(self._settings, target).context_of(target),
            "fingerprint": target.info.fingerprint,
        }

    async def fleet(self, request: Request) -> Response:
        """Return information on the coordinator and its workers."""
        info = await self._sessions.info()
        workers: list[Any] = [asdict(it) | {"role": it.role.name.lower()} for it in info.workers]
        return JSONResponse(cast(Fleet, asdict(info) | {"workers": workers}))

    async def metrics(self, request: Request) -> Response:
        body, media = self._sessions.metrics.render()
        return Response(body, headers={"Content-Type": media})

    async def ready(self, request: Request) -> Response:
        if not self._sessions.ready:
            return respond(Unavailable("no verifier is ready", retry_after_ms=2000))
        return JSONResponse(Status(status="ready"))


_STARTED = time.time()
_OPEN = pages.OPEN_PAGES | {"/openapi.json", "/health", "/ready"}  # for probes and browsers, which send no key


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if not _KEY.fullmatch(key):
        limit = f"at most {MAX_KEY_CHARACTERS} printable ASCII characters without spaces"
        raise InvalidRequest.of("Idempotency-Key", ascii(key), limit)
    return key
