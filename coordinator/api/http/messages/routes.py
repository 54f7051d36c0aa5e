"""Routes of Anthropic's API, and what is theirs alone: errors in its shape, and the header with the request's id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.bodies import read_body
from coordinator.api.http.failures import SHAPE
from coordinator.api.http.messages.bodies import CountTokensBody, MessagesBody
from coordinator.api.http.messages.replies import plan_message
from coordinator.api.http.messages.types import TokenCount
from coordinator.api.http.responses import Error
from coordinator.api.preprocess import admission, prompt_tokens
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.target import Target
from outrider.base.aio import beside
from outrider.observability.request_context import REQUEST_ID, current
from outrider.settings.coordinator import CoordinatorSettings

PATH = "/v1/messages"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_TYPES |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class MessagesApi:
    """Handlers of messages and of the count of their tokens; `generate` answers any body."""

    def __init__(
        self, generate: Callable[..., Awaitable[Response]], sessions: SessionManager, settings: CoordinatorSettings
    ) -> None:
        self._generate = generate
        self._sessions = sessions
        self._settings = settings

    def routes(self) -> list[Route]:
        handlers = {PATH: self.message, f"{PATH}/count_tokens": self.count}
        return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]

    async def message(self, request: Request) -> Response:
        return await self._generate(request, (await read_body(request, MessagesBody)).chat, plan_message)

    async def count(self, request: Request) -> Response:
        chat = (await read_body(request, CountTokensBody)).chat
        with admission(self._sessions.metrics):
            target = await self._sessions.targets.find(chat.model)
            return await beside(request.state.size, self._counted, chat, target)

    def _counted(self, chat: ChatBody, target: Target) -> Response:
        [request], _ = plan_message(chat, target, self._settings)
        tokens = prompt_tokens(request.input, target, self._settings.max_prompt_kib * 1024)
        return JSONResponse(TokenCount(input_tokens=len(tokens)))


class MessagesShape:
    """Middleware around all others: what these routes answer has Anthropic's form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers[REQUEST_ID]
            await send(message)

        ours = scope["path"].startswith(PATH)
        SHAPE.set(_shaped if ours else None)  # a pipelined request begins within the context of the one before
        await self._app(scope, receive, send_on if ours else send)


def _shaped(error: Error, status: int) -> Error:
    """Return an error in Anthropic's shape, with the words by which Claude Code knows that it has to shorten a chat."""
    told = error["error"]
    told["type"] = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if (told["code"], told["param"]) == ("context_length_exceeded", "messages"):
        told["message"] = f"prompt is too long: {told['message']}"
    return {"type": "error", "error": told, "request_id": current().request_id}
