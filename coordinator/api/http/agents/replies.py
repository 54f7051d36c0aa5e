"""Replies to chats: content, reasoning and tool calls, whole and in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from coordinator.api.http import responses
from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.chat_replies import ChatReplies
from coordinator.api.http.agents.dialects import THINK, THOUGHT, Manner, manner_of, opens_thinking
from coordinator.api.http.agents.parser import AnswerParser, Part, PartKind
from coordinator.api.http.agents.prompts import chat_of
from coordinator.api.http.agents.tool_grammar import grammar_of
from coordinator.api.http.answer import input_of
from coordinator.api.http.failures import FIELD_NAMES
from coordinator.api.preprocess import ClientRequest
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.settings.coordinator import CoordinatorSettings


def plan_chat(body: ChatBody, target: Target, settings: CoordinatorSettings) -> tuple[list[ClientRequest], ChatReplies]:
    """Return the input of a chat, and the formatter of its replies."""
    name_as_sent(body, {"prompt": "messages"})
    request, manner = chat_input(body, target, settings)
    if body.calls_required is None and not manner.thinks:
        return [request], ChatReplies(body, target, target.served_name)
    return [request], PartedReplies(body, target, target.served_name, manner)


def chat_input(body: ChatBody, target: Target, settings: CoordinatorSettings) -> tuple[ClientRequest, Manner]:
    """Return the input of a chat, and the form of its answers."""
    manner, required = manner_of(target, settings.tool_parser), body.calls_required
    tools = (body.tools or ()) if required is not None else ()
    request = input_of(body, chat=(chat := chat_of(body, tools, manner)))
    grammar = request.params.grammar
    thinks = manner.thinks and body.add_generation_prompt and (required is not None or grammar is None)
    manner = replace(manner, thinks=thinks, thinking=thinks and opens_thinking(target, chat))
    if required is not None:
        schemas = {tool.function.name: tool.function.schema_of_arguments for tool in body.callable_tools}
        parallel = manner.several and body.parallel_tool_calls is not False and isinstance(body.tool_choice, str | None)
        grammar = grammar_of(schemas, manner, target, required=required, parallel=parallel, answer=grammar)
    return replace(request, params=replace(request.params, grammar=grammar)), manner


def name_as_sent(body: ChatBody, names: dict[str, str]) -> None:
    """Name fields in errors as the request does. A grammar was made of the tools, if any can be called."""
    if body.calls_required is not None:
        more = f" and {names.get('params.grammar', 'response_format')}" if body.formatted else ""
        names = {**names, "params.grammar": f"tools{more}"}
    FIELD_NAMES.get({}).update(names)


class AnswerReader:
    """Reader of one answer in parts, from the tokens of its session."""

    def __init__(self, body: ChatBody, target: Target, manner: Manner) -> None:
        names = [tool.function.name for tool in body.callable_tools] if body.calls_required is not None else []
        self.parser = AnswerParser(manner, names, formatted=body.formatted)
        self._thought = 0
        dialect, added = manner.dialect, target.tokenizer.added_tokens_decoder.items()
        marks = [dialect.opener, dialect.closer, dialect.bare] * bool(names) + [THINK, THOUGHT] * manner.thinks
        self._marks = {id_: token.content for id_, token in added if token.special and token.content in marks}

    def read(self, session: Session, tokens: Sequence[Token], *, ended: bool) -> list[Part]:
        # Special tokens have no text in answers, also those that mark calls.
        parser, parts = self.parser, list[Part]()
        texts = [token.text + self._marks.get(token.token, "") for token in reversed(tokens)]
        while texts and parser.is_thinking() is not False:
            parts += parser.feed(texts.pop())
            self._thought += bool(parser.is_thinking())
        session.output.thought = max(self._thought, session.output.thought)  # of several readers
        parts += parser.feed("".join(reversed(texts)) + session.output.rest.text * ended)
        parts += parser.end() if ended else ()
        return [Part(kind, "".join(one.text for one in same)) for kind, same in groupby(parts, lambda one: one.kind)]


class PartedReplies(ChatReplies):
    """Formatter of answers that may have reasoning and tool calls besides their content."""

    def __init__(self, body: ChatBody, target: Target, model: str, manner: Manner) -> None:
        super().__init__(body, target, model)
        self._readers = [AnswerReader(body, target, manner) for _ in range(body.choices)]

    def _message(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.AnswerMessage:
        texts = dict.fromkeys(PartKind, "")
        calls: list[responses.ToolCallDelta] = []
        for part in self._readers[number].read(session, tokens, ended=True):
            texts[part.kind] += part.text
            if part.kind is PartKind.CALL:
                calls.append(_call(session, len(calls), part.text))
            elif part.kind is PartKind.ARGUMENTS:
                calls[-1]["function"]["arguments"] += part.text
        content = texts[PartKind.CONTENT] or (None if calls else "")
        message: responses.AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := texts[PartKind.REASONING]:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _deltas(self, number: int, session: Session, tokens: Sequence[Token]) -> list[responses.Delta]:
        deltas: list[responses.Delta] = []
        before = self._readers[number].parser.calls
        for part in self._readers[number].read(session, tokens, ended=not tokens):
            if part.kind is PartKind.CONTENT:
                deltas.append({"content": part.text})
            elif part.kind is PartKind.REASONING:
                deltas.append({"reasoning_content": part.text})
            elif part.kind is PartKind.CALL:
                deltas.append({"tool_calls": [{"index": before, **_call(session, before, part.text)}]})
                before += 1
            else:
                deltas.append({"tool_calls": [{"index": before - 1, "function": {"arguments": part.text}}]})
        return deltas

    def _reason(self, number: int, session: Session) -> responses.FinishName:
        reason = super()._reason(number, session)
        parser = self._readers[number].parser
        return "tool_calls" if reason == "stop" and parser.calls and not parser.cut else reason


def call_id(session: Session, index: int) -> str:
    """Return the id of a call, the same whenever the answer is repeated. Templates of Mistral want 9 characters."""
    return hashlib.sha256(f"{session.record.session_id}/{index}".encode()).hexdigest()[:9]


def _call(session: Session, index: int, name: str) -> responses.ToolCallDelta:
    """Return a call without arguments."""
    return {"id": call_id(session, index), "type": "function", "function": {"name": name, "arguments": ""}}
