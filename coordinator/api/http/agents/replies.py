"""Replies to chats: content, reasoning and tool calls, whole and in chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.api.http import responses
from coordinator.api.http.agents.bodies import ChatBody, lenient
from coordinator.api.http.agents.manners import chat_of, manner_of
from coordinator.api.http.agents.parser import Parser, PartKind
from coordinator.api.http.answer import input_of
from coordinator.api.http.bodies import ChatOptions
from coordinator.api.http.failures import FIELD_NAMES
from coordinator.api.http.replies import Replies, call_id, reason_of
from coordinator.api.preprocess import ClientRequest
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import Grammar
from outrider.settings.coordinator import CoordinatorSettings

ChatInput = tuple[ClientRequest, list[Parser]]  # with a parser of each answer
_FIELDS = {"params.grammar": "response_format", "prompt": "messages"}  # by their names in gRPC


def plan_chat(body: ChatBody, target: Target, settings: CoordinatorSettings) -> tuple[list[ClientRequest], ChatReplies]:
    """Return the input of a chat, and the formatter of its replies."""
    request, parsers = chat_input(body, target, settings)
    body = body.model_copy(update={"messages": [], "tools": None})  # an answer may take minutes, and these megabytes
    return [request], ChatReplies(body, target, parsers)


def chat_input(
    body: ChatBody, target: Target, settings: CoordinatorSettings, names: Mapping[str, str] = _FIELDS
) -> ChatInput:
    """Return the input of a chat. Errors name fields as the request does."""
    given = "structured_outputs" if body.structured_outputs else names["params.grammar"]
    given = f"tools and {given}" if body.formatted else given if body.calls_required is None else "tools"
    FIELD_NAMES.get({}).update({**names, "params.grammar": given})
    manner, required = manner_of(target, settings.tool_parser), body.calls_required
    tools = (body.tools or ()) if required is not None else ()
    request = input_of(body, chat := chat_of(body, tools, manner, target), target, settings)
    grammar = request.params.grammar
    form = body.response_format and body.response_format.json_schema
    if form and form.schema_ is not None and not form.strict:
        grammar = Grammar(json_schema=json.dumps(lenient(form.schema_)))
    thinks = manner.thinks and body.add_generation_prompt and (required is not None or grammar is None)
    opened = thinks and target.preview(chat).rstrip().endswith(manner.thoughts[0])  # templates may look into messages
    manner = replace(manner, thinks=thinks, thinking=opened)
    schemas = {tool.function.name: tool.function.schema_of_arguments for tool in body.callable_tools if tools}
    params = replace(request.params, grammar=manner.grammar(schemas, body, target, grammar))
    request = replace(request, params=params, form=manner.dialect.name if body.tools else "")
    return request, manner.parsers(schemas, body, target)


class ChatReplies(Replies[ChatOptions]):
    """Formatter of answers that may have reasoning and tool calls besides their content."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatBody, target: Target, parsers: Sequence[Parser]) -> None:
        super().__init__(body, target)
        self._parsers = parsers

    def _choice(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.ChatChoice:
        return {
            "index": number,
            "message": self._message(number, session, tokens),
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._reason(number, session),
            **self._details(session, tokens, chunk=False),
        }

    def _head(self, kind: str, session: Session) -> dict[str, Any]:
        ids = {"prompt_token_ids": [*session.record.request.prompt]} if self._body.return_token_ids else {}
        return super()._head(kind, session) | ids | self._scored(0)

    def _parts(self, number: int, session: Session, tokens: Sequence[Token]) -> list[responses.ChatChunkChoice]:
        parts: list[responses.ChatChunkChoice] = []
        if not self._written:  # all choices, in their order: OpenAI's client appends each at its first chunk
            begun: responses.Delta = {"role": "assistant", "content": "", "refusal": None}
            every = range(self._body.choices)
            parts = [{"index": it, "delta": begun, "logprobs": None, "finish_reason": None} for it in every]
        self._written[number] += 1
        deltas = self._deltas(number, session, tokens, ended=not tokens)
        logprobs, details = self._logprobs(tokens), self._details(session, tokens)
        if tokens and not deltas and (logprobs or details):
            deltas = [{"content": ""}]
        for delta in deltas:
            parts.append({"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None, **details})
            logprobs, details = None, {}
        if not tokens:
            end = self._reason(number, session)
            parts.append({"index": number, "delta": {}, "logprobs": None, "finish_reason": end})
        return parts

    def _logprobs(self, tokens: Sequence[Token]) -> responses.ChatLogprobs | None:
        content = logprobs_of(tokens, self._target)
        return {"content": content, "refusal": None} if content else None

    def _message(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.AnswerMessage:
        """Return a whole message, the sum of its deltas."""
        deltas, calls = self._deltas(number, session, tokens, ended=True), list[responses.ToolCallDelta]()
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            if call.pop("index") == len(calls):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        content = "".join(delta.get("content", "") for delta in deltas) or (None if calls else "")
        message: responses.AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        if thoughts := "".join(delta.get("reasoning_content", "") for delta in deltas):
            message["reasoning_content"] = thoughts
        return {**message, "tool_calls": calls} if calls else message

    def _deltas(self, number: int, session: Session, tokens: Sequence[Token], *, ended: bool) -> list[responses.Delta]:
        deltas: list[responses.Delta] = []
        at = self._parsers[number].calls - 1
        for part in self._parsers[number].read(session, tokens, ended=ended):
            call: responses.ToolCallDelta = {"function": {"arguments": part.text}}
            if part.kind is PartKind.CALL:
                at += 1
                function: responses.ToolCallFunction = {"name": part.text, "arguments": ""}
                call = {"id": call_id(session, at), "type": "function", "function": function}
            if part.kind is PartKind.CONTENT:
                deltas.append({"content": part.text})
            elif part.kind is PartKind.REASONING:
                deltas.append({"reasoning_content": part.text})
            else:
                deltas.append({"tool_calls": [{"index": at, **call}]})
        return deltas

    def _reason(self, number: int, session: Session) -> responses.FinishName:
        reason, parser = reason_of(session), self._parsers[number]
        return "tool_calls" if reason == "stop" and parser.calls and not parser.cut else reason


def logprobs_of(tokens: Sequence[Token], target: Target) -> list[responses.ContentLogprob]:
    """Return the log probabilities of tokens, of those that have them."""

    def told(token: int, logprob: float) -> responses.TopLogprob:
        data = target.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    known = ((token.token, token.logprobs) for token in tokens if token.logprobs is not None)
    return [
        {**told(token, it.logprob), "top_logprobs": [*map(told, it.top_ids, it.top_logprobs)]} for token, it in known
    ]
