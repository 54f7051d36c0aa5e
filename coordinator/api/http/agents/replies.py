"""Replies to chats: content, reasoning and tool calls, whole and in chunks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coordinator.api.http import responses
from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.chat_replies import ChatReplies
from coordinator.api.http.agents.dialects import THINK, THOUGHT, Manner, manner_of
from coordinator.api.http.agents.parser import AnswerParser, Part, PartKind
from coordinator.api.http.agents.prompts import chat_of
from coordinator.api.http.agents.tool_grammar import grammar_of
from coordinator.api.http.answer import input_of, served_name
from coordinator.api.preprocess import ClientRequest
from coordinator.sessions.output import Token
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import Grammar
from outrider.settings.coordinator import CoordinatorSettings

_ID_CHARACTERS = 9  # of a call's id: chat templates of Mistral accept no other length


def plan_chat(body: ChatBody, target: Target, settings: CoordinatorSettings) -> tuple[list[ClientRequest], ChatReplies]:
    """Return the input of a chat, and the formatter of its replies."""
    prompted = body.add_generation_prompt
    manner = manner_of(target, settings.tool_parser, prompted=prompted)
    tools = (body.tools or ()) if body.calls_required is not None else ()
    request = input_of(body, chat=chat_of(body, tools, manner))
    grammar = _grammar(body, manner, target, request.params.grammar)
    request = replace(request, params=replace(request.params, grammar=grammar))
    name = served_name(target, settings)
    thinks = manner.thinks and prompted and (body.calls_required is not None or grammar is None)
    if body.calls_required is None and not thinks:
        return [request], ChatReplies(body, target, name)
    return [request], PartedReplies(body, target, name, replace(manner, thinks=thinks))


@contextlib.contextmanager
def tools_named(body: ChatBody) -> Iterator[None]:
    """Name the tools in refusals of the grammar that was made of them."""
    try:
        yield
    except InvalidRequest as error:
        if body.calls_required is None or not error.field.startswith("params.grammar"):
            raise
        message = error.message.replace(error.field, "tools")
        raise InvalidRequest(message, field="tools", value=error.value, limit=error.limit) from error


def _grammar(body: ChatBody, manner: Manner, target: Target, answer: Grammar | None) -> Grammar | None:
    required = body.calls_required
    if required is None:
        return answer
    schemas = {tool.function.name: tool.function.schema_of_arguments for tool in body.callable_tools}
    named = body.tool_choice not in (None, "auto", "required")
    parallel = body.parallel_tool_calls is not False and not named
    return grammar_of(schemas, manner, target, required=required, parallel=parallel)


class PartedReplies(ChatReplies):
    """Formatter of answers that may have reasoning and tool calls besides their content."""

    def __init__(self, body: ChatBody, target: Target, model: str, manner: Manner) -> None:
        super().__init__(body, target, model)
        self._manner = manner
        self._names = [tool.function.name for tool in body.callable_tools] if body.calls_required is not None else []
        self._parsers: dict[int, AnswerParser] = {}
        marks = (THINK, THOUGHT, manner.dialect.opener, manner.dialect.closer, manner.dialect.bare)
        added = target.tokenizer.added_tokens_decoder.items()
        self._marks = {id_: token.content for id_, token in added if token.content in marks}

    def _parsed(self, number: int, session: Session, tokens: Sequence[Token], *, ended: bool) -> list[Part]:
        manner = self._manner
        dialect = manner.dialect if self._names else None
        parser = self._parsers.setdefault(
            number, AnswerParser(dialect, self._names, thinks=manner.thinks, thinking=manner.thinking)
        )
        # Special tokens have no text in answers, also those that mark calls.
        parts = parser.feed("".join(token.text or self._marks.get(token.token, "") for token in tokens))
        return [*parts, *parser.feed(session.output.rest.text), *parser.end()] if ended else parts

    def _message(self, number: int, session: Session, tokens: Sequence[Token]) -> responses.AnswerMessage:
        texts = dict.fromkeys(PartKind, "")
        calls: list[responses.ToolCallDelta] = []
        for part in self._parsed(number, session, tokens, ended=True):
            texts[part.kind] += part.text
            if part.kind is PartKind.CALL:
                calls.append(_call(session, len(calls), part.text))
            elif part.kind is PartKind.ARGUMENTS:
                calls[-1]["function"]["arguments"] += part.text
        content = texts[PartKind.CONTENT]
        message: responses.AnswerMessage = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if reasoning := texts[PartKind.REASONING]:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _deltas(self, number: int, session: Session, tokens: Sequence[Token]) -> list[responses.Delta]:
        deltas: list[responses.Delta] = []
        before = self._calls(number)
        for part in self._parsed(number, session, tokens, ended=not tokens):
            if part.kind is PartKind.CONTENT:
                deltas.append({"content": part.text})
            elif part.kind is PartKind.REASONING:
                deltas.append({"reasoning_content": part.text})
            elif part.kind is PartKind.CALL:
                deltas.append({"tool_calls": [{"index": before, **_call(session, before, part.text)}]})
                before += 1
            else:
                more: responses.ToolCallDelta = {"index": before - 1, "function": {"arguments": part.text}}
                deltas.append({"tool_calls": [more]})
        return deltas

    def _reason(self, number: int, session: Session) -> responses.FinishName:
        reason = super()._reason(number, session)
        return "tool_calls" if reason == "stop" and self._calls(number) else reason

    def _calls(self, number: int) -> int:
        return self._parsers[number].calls if number in self._parsers else 0


def _call(session: Session, index: int, name: str) -> responses.ToolCallDelta:
    """Return a call without arguments. Its id is the same whenever the answer is repeated."""
    digest = hashlib.sha256(f"{session.record.session_id}/{index}".encode()).hexdigest()
    return {"id": digest[:_ID_CHARACTERS], "type": "function", "function": {"name": name, "arguments": ""}}
