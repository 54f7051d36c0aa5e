"""Texts and chats as tokens of the target, and back, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import TypedDict

from coordinator.admission.model_limits import limits_of
from coordinator.api.http.agents.bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from coordinator.api.http.agents.manners import chat_of, manner_of
from coordinator.api.http.bodies import read_body
from coordinator.api.preprocess import admission, prompt_tokens
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.target import Target
from outrider.base.aio import beside
from outrider.protocol.checks import check_count, check_tokens
from outrider.settings.coordinator import CoordinatorSettings


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class TokensApi:
    """Handlers of `/tokenize` and `/detokenize`."""

    def __init__(self, sessions: SessionManager, settings: CoordinatorSettings) -> None:
        self._sessions = sessions
        self._settings = settings
        self._limit = settings.max_prompt_kib * 1024

    def routes(self) -> list[Route]:
        return [Route(f"/{each.__name__}", each, methods=["POST"]) for each in (self.tokenize, self.detokenize)]

    async def tokenize(self, request: Request) -> Response:
        body: TokenizeChatBody | TokenizeTextBody = await read_body(request, TokenizeTextBody, TokenizeChatBody)
        with admission(self._sessions.metrics):
            target = await self._sessions.targets.find(body.model)
            return await beside(request.state.size, self._tokenized, body, target)

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        with admission(self._sessions.metrics):
            target = await self._sessions.targets.find(body.model)
            check_count("tokens", len(body.tokens), self._limit, "ids")
            check_tokens("tokens", body.tokens, target.info.vocab_size)
        text = await asyncio.to_thread(target.tokenizer.decode, body.tokens, clean_up_tokenization_spaces=False)
        return await asyncio.to_thread(JSONResponse, Detokenized(prompt=text))

    def _tokenized(self, body: TokenizeChatBody | TokenizeTextBody, target: Target) -> Response:
        if isinstance(body, TokenizeChatBody):
            chat = chat_of(body, body.tools or (), manner_of(target, self._settings.tool_parser), target)
            tokens = list(prompt_tokens(chat, target, self._limit))
        else:
            check_count("prompt", len(body.prompt.encode()), self._limit, "bytes")
            tokens = list(target.encode(body.prompt, special=body.add_special_tokens))
        texts = target.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        context = limits_of(self._settings, target).context_of(target)
        return JSONResponse(Tokenized(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=texts))
