"""Request bodies of Anthropic's API, which are read as chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from coordinator.api.http.agents import bodies as chats
from coordinator.api.http.bodies import Body, JsonSchema, MarkedBody, OneAnswerBody, ResponseFormat, StopText, Unkept
from outrider.protocol.field_limits import LONGEST, MOST, OTHER

_SWITCHES = ("enable_thinking", "thinking", "reasoning")  # by which chat templates turn thinking on or off
_LABEL = "x-anthropic-billing-header:"  # of Claude Code, before its instructions; it differs by conversation
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class TextBlock(chats.TextPart):
    type: Literal["text"]


class ThinkingBlock(MarkedBody):
    type: Literal["thinking"]
    thinking: str = Field(description="For templates that show it.")
    signature: Annotated[str | None, Unkept] = Field(None, description="Ignored.")


class RedactedBlock(MarkedBody):
    type: Literal["redacted_thinking"]
    data: Annotated[str, Unkept] = Field(description="Ignored: the target is told nothing of it.")


class CallBlock(MarkedBody):
    type: Literal["tool_use"]
    id: str = Field(max_length=OTHER)
    name: ToolName
    input: dict[str, Any]
    caller: Annotated[dict[str, Any] | None, Unkept] = Field(None, description="Ignored.")

    @property
    def call(self) -> chats.ToolCall:
        function = chats.CalledFunction.model_construct(name=self.name, arguments=json.dumps(self.input))
        return chats.ToolCall.model_construct(id=self.id, type="function", function=function)


class ResultBlock(MarkedBody):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=OTHER)
    content: str | Annotated[list[TextBlock], Field(max_length=chats.MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = Field(None, description="True: the target reads 'Error:' before the content.")

    @property
    def message(self) -> dict[str, Any]:
        parts = [_text(self.content)] if isinstance(self.content, str) else self.content or []
        told = [_text("Error:")] * bool(self.is_error) + parts
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": told}


def _text(text: str) -> TextBlock:
    return TextBlock(type="text", text=text)


_OF_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
_OF_ROLE = {"user": ("text", "tool_result"), "assistant": _OF_ASSISTANT, "system": ("text",)}
Block = Annotated[TextBlock | ThinkingBlock | RedactedBlock | CallBlock | ResultBlock, chats.ByType()]


class Turn(MarkedBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, max_length=chats.MAX_PARTS, fail_fast=True)]

    @field_validator("content", mode="before")
    @classmethod
    def _known_blocks(cls, content: Any, turn: ValidationInfo) -> Any:
        """Raise for the first block of no type that there is, with those that the role has."""
        kinds = _OF_ROLE.get(turn.data.get("role", ""), ())
        for at, block in enumerate(content if isinstance(content, list) and kinds else ()):
            kind = block.get("type", "text") if isinstance(block, dict) else "text"
            if kind not in (*_OF_ASSISTANT, "tool_result"):
                told = {"expected": " or ".join(map(repr, kinds))}
                fault = InitErrorDetails(type="literal_error", loc=(at, "type"), input=kind, ctx=told)
                raise ValidationError.from_exception_data(cls.__name__, [fault])
        return content

    @model_validator(mode="after")
    def _of_its_role(self) -> Turn:
        if any(block.type not in _OF_ROLE[self.role] for block in self.blocks):
            raise ValueError(f"content of role {self.role} has blocks of type {' and '.join(_OF_ROLE[self.role])}")
        return self

    @property
    def blocks(self) -> Sequence[Any]:
        return [_text(self.content)] if isinstance(self.content, str) else self.content


class CustomTool(chats.Function):
    type: Literal["custom"] = "custom"
    name: ToolName
    parameters: dict[str, Any] = Field(alias="input_schema", description="JSON schema of an object.")
    eager_input_streaming: Annotated[bool | None, Unkept] = Field(None, description="Ignored.")


class ToolRule(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="With type tool: the one to call.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: at most one call in an answer.")

    @model_validator(mode="after")
    def _named(self) -> ToolRule:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and only there")
        return self

    @property
    def of_a_chat(self) -> dict[str, Any]:
        choice: Any = self.type.replace("any", "required")
        if self.name is not None:
            choice = chats.ToolChoice.model_construct(function=chats.NamedFunction.model_construct(name=self.name))
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class ThinkingRule(Body):
    type: Literal["enabled", "adaptive", "disabled"] = Field(description="For the chat template.")
    budget_tokens: Annotated[int | None, Unkept] = Field(None, description="Ignored: only max_tokens limits thinking.")
    display: Annotated[str | None, Unkept] = Field(None, description="Ignored: thinking is sent as it is.")


class OutputFormat(JsonSchema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(None, description="For the chat template.")
    format: OutputFormat | None = None


class ContextEdit(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Any, Unkept] = Field(None, description="Ignored: the chat template says which thinking it shows.")


class ContextEdits(Body):
    edits: Annotated[list[ContextEdit], Field(max_length=1)] | None = None


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`."""

    passes: ClassVar[dict[str, Any]] = {"cache_control": ...}
    model: str | None = Field(None, max_length=LONGEST["model"], description="Of /v1/models; absent: the default one.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=chats.MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=chats.MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=chats.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolRule | None = None
    thinking: ThinkingRule | None = Field(None, description="Absent: disabled.")
    output_config: OutputConfig | None = None
    context_management: ContextEdits | None = None
    chat_template_kwargs: chats.TemplateVariables | None = None
    speed: Annotated[str | None, Unkept] = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _whole(self) -> CountTokensBody:
        if self.tool_choice and self.tool_choice.type == "any" and not self.tools:
            raise ValueError("tool_choice any needs tools")
        _ = self.chat
        return self

    @cached_property
    def chat(self) -> chats.ChatBody:
        """Return the same request as a chat."""
        given = {name: value for name, value in self if name in _SAME}
        given |= {} if self.tool_choice is None else self.tool_choice.of_a_chat
        given["tools"] = [chats.Tool.model_construct(type="function", function=tool) for tool in self.tools or ()]
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        given["chat_template_kwargs"] = dict.fromkeys(_SWITCHES, thinks) | (self.chat_template_kwargs or {})
        if self.output_config is not None:
            given["reasoning_effort"], form = self.output_config.effort, self.output_config.format
            given["response_format"] = form and ResponseFormat.model_construct(type=form.type, json_schema=form)
        if self.messages[-1].role == "assistant":
            given |= {"add_generation_prompt": False, "continue_final_message": True}
        parts = [_text(self.system)] if isinstance(self.system, str) else self.system or []
        told = [part for part in parts if not part.text.startswith(_LABEL)]
        turns = [Turn.model_construct(role="system", content=told)] * bool(told) + self.messages
        return chats.ChatBody(messages=[*_messages(turns)], **given)


class MessagesBody(CountTokensBody, OneAnswerBody):
    """`POST /v1/messages`."""

    passes: ClassVar[dict[str, Any]] = CountTokensBody.passes | OneAnswerBody.passes
    max_tokens: int = Field(ge=1, lt=2**31)
    stop: Annotated[list[StopText], Field(max_length=MOST["stop"], fail_fast=True)] | None = Field(
        None, alias="stop_sequences"
    )
    stream_options: None = Field(None, description="Streams have the usage.")
    response_format: None = Field(None, description="Its name is output_config.format here.")


_SAME = {*OneAnswerBody.model_fields, "max_tokens"}  # fields of both


def _messages(turns: Sequence[Turn]) -> Iterator[chats.Message]:
    """Yield turns as messages; those of one role that follow each other are one, but for results of tools."""
    for role, same in groupby(turns, lambda turn: turn.role):
        blocks = [block for turn in same for block in turn.blocks]
        message: dict[str, Any] = {"role": role}
        if role == "assistant":
            of_kind: dict[str, list[Any]] = {kind: [it for it in blocks if it.type == kind] for kind in _OF_ROLE[role]}
            message["reasoning_content"] = "\n".join(block.thinking for block in of_kind["thinking"])
            message["tool_calls"] = [block.call for block in of_kind["tool_use"]] or None
            blocks = of_kind["text"] or [_text("")]
        for kind, some in groupby(blocks, lambda block: block.type):
            same_kind = [*some]
            results = [block.message for block in same_kind if kind == "tool_result"]
            yield from (chats.Message(**it) for it in results or [message | {"content": same_kind}])
