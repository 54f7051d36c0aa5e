"""Request bodies of `/v1/responses`, which are read as chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from coordinator.api.http.agents import bodies as chats
from coordinator.api.http.bodies import Body, JsonSchema, MarkedBody, OneAnswerBody, ResponseFormat
from outrider.protocol.field_limits import OTHER
from outrider.protocol.sampling_params import MAX_LOGPROBS


def _absent(value: Any) -> Any:
    if value:
        raise ValueError("not supported: nothing is stored, so send all items as input")
    return value


_LOGPROBS = "message.output_text.logprobs"
_Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_UNSTORED = Field(description="Not supported: nothing is stored.")
_Absent = Annotated[None, BeforeValidator(_absent), _UNSTORED]
_False = Annotated[bool | None, AfterValidator(_absent), _UNSTORED]


class _Item(MarkedBody):
    status: str | None = Field(None, max_length=64, description="Ignored.")


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | chats.Parts

    @property
    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content}


class CallItem(_Item, chats.CalledFunction):
    type: Literal["function_call"]
    call_id: str = Field(max_length=OTHER)
    namespace: chats.FunctionName | None = None

    @property
    def message(self) -> dict[str, Any]:
        call = chats.ToolCall(id=self.call_id, function=self.within(self.namespace))
        return {"role": "assistant", "tool_calls": [call]}


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=OTHER)
    output: str | chats.Parts

    @property
    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: chats.Parts | None = Field(None, description="For templates that show it.")
    summary: chats.Parts | None = Field(None, description="Read in place of an absent content.")

    @property
    def message(self) -> dict[str, Any]:
        parts = self.content or self.summary or ()
        return {"role": "assistant", "reasoning_content": "\n".join(part.text for part in parts)}


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, chats.ByType()]


class FunctionTool(chats.Function):
    type: Literal["function", "namespace"]
    tools: Annotated[list[FunctionTool], Field(max_length=chats.MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_level(self) -> FunctionTool:
        if (self.tools is None) != (self.type == "function") or any(it.tools is not None for it in self.tools or ()):
            raise ValueError("tools are functions, required with type namespace, and only there")
        return self


class ServerTool(BaseModel):
    """A tool that OpenAI's servers would run. It is only offered, so the target is not told of it."""

    type: Literal["web_search", "web_search_preview", "image_generation"]


class FunctionChoice(chats.NamedFunction):
    type: Literal["function"]


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=chats.MAX_TOOLS, fail_fast=True)]


_Tool = Annotated[FunctionTool | ServerTool, chats.ByType()]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is required with type json_schema, and only there")
        return self


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: chats.Verbosity | None = None


class ReasoningOptions(Body):
    effort: chats.Effort | None = None
    summary: str | None = Field(None, max_length=64, description="Ignored: reasoning is sent as it is.")


class ResponsesBody(OneAnswerBody):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=chats.MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[_Tool], Field(max_length=chats.MAX_TOOLS, fail_fast=True)] | None = Field([])
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[FunctionChoice | AllowedFunctions, chats.ByType()] | None
    ) = "auto"
    parallel_tool_calls: bool | None = Field(True, description="False: at most one call in an answer.")
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: chats.TemplateVariables | None = None
    response_format: None = Field(None, description="Its name is text.format here.")
    metadata: dict[str, Any] | None = Field(None, description="The answer has it, too.")
    store: _False = None
    background: _False = None
    previous_response_id: _Absent = None
    conversation: _Absent = None
    truncation: Literal["auto", "disabled"] | None = Field("disabled", description="auto: leave out the oldest items.")
    top_logprobs: int | None = Field(0, ge=0, le=MAX_LOGPROBS, description=f"With {_LOGPROBS} in include.")
    include: Annotated[list[_Included], Field(max_length=2, description="Reasoning is sent as it is.")] | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponsesBody:
        _ = self.chat
        json.dumps([self.metadata, self.model_dump(include={"text", "tools"})], allow_nan=False)  # the reply has them
        return self

    @property
    def functions(self) -> Iterator[tuple[FunctionTool, dict[str, str]]]:
        """Yield the functions as the target is told of them, each with the fields that name it in a call."""
        for tool in (it for it in self.tools or () if isinstance(it, FunctionTool)):
            space = {} if tool.tools is None else {"namespace": tool.name}
            for each in [tool] if tool.tools is None else tool.tools:
                yield each.within(space.get("namespace")), {"name": each.name, **space}

    @cached_property
    def chat(self) -> chats.ChatBody:
        """Return the same request as a chat."""
        given: dict[str, Any] = {name: value for name, value in self if name in chats.ChatBody.model_fields}
        given |= {"tool_choice": _nested(self.tool_choice), "max_completion_tokens": self.max_output_tokens}
        given["tools"] = [chats.Tool(type="function", function=tool) for tool, _ in self.functions]
        text = self.text or TextOptions()
        given["logprobs"] = _LOGPROBS in (self.include or ())
        given |= {"verbosity": text.verbosity, "reasoning_effort": self.reasoning and self.reasoning.effort}
        if (form := text.format) is not None:
            schema = form if form.type == "json_schema" else None
            given["response_format"] = ResponseFormat.model_construct(type=form.type, json_schema=schema)
        return chats.ChatBody(messages=_messages(self.instructions, self.input), **given)


def _nested(choice: Any) -> Any:
    """Return a choice of tools in the form that chats have for it."""
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [*map(_nested, choice.tools)]}
        return {"type": choice.type, "allowed_tools": allowed}
    return {"type": choice.type, "function": choice} if isinstance(choice, FunctionChoice) else choice


def _messages(instructions: str | None, items: str | Sequence[Item]) -> list[chats.Message]:
    """Return items as messages. Reasoning, content and calls that follow each other are one message."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    given = [{"role": "user", "content": items}] if isinstance(items, str) else [item.message for item in items]
    for message in given:
        last = messages[-1] if messages else {}
        goes_on = "tool_calls" in message or ("content" in message and last.keys() == {"role", "reasoning_content"})
        if goes_on and last.get("role") == message["role"] == "assistant":
            calls = last.get("tool_calls", []) + message.get("tool_calls", [])
            last |= message | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    return [chats.Message(**({"content": ""} | message)) for message in messages]
