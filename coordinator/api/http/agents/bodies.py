"""Request bodies of chats, and of the conversion between texts and tokens."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, from_json
from pydantic_core.core_schema import tagged_union_schema

from coordinator.api.http.bodies import Body, ChatOptions, CompletionBody, Flag, MarkedBody, TokenId, check_counts
from outrider.protocol.field_limits import LONGEST, OTHER
from outrider.speculation.grammar import CONSTANTS

MAX_MESSAGES = MAX_PARTS = 1_000  # besides the instructions of a response
MAX_TOOLS = 128
_LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\\[bBk1-9]|\(\?(?:<?[=!]|P=))")  # around in a pattern, or back
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
_Switch = Literal["enable_thinking", "thinking", "reasoning", "clear_thinking", "preserve_thinking"]
TemplateVariables = dict[_Switch, bool]


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which what grammars lack constrains nothing."""
    own = schema.get("x-guidance")
    options = {"lenient": True, **own} if isinstance(own, dict) else own or {"lenient": True}
    return {**_bare(schema), "x-guidance": options}


def _bare(part: Any) -> Any:
    """Return a part of a schema without patterns that look around or back."""
    if isinstance(part, dict):
        looks = isinstance(pattern := part.get("pattern"), str) and _LOOKS.search(pattern)
        return {key: it if key in CONSTANTS else _bare(it) for key, it in part.items() if not looks or key != "pattern"}
    return [_bare(it) for it in part] if isinstance(part, list) else part


class ByType:
    """Annotation of a union whose members are told by their type; all other types are those of the first one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = {name: it for it in get_args(source) for name in get_args(it.model_fields["type"].annotation)}
        first, *others = kinds

        def tag(value: Any) -> str:
            given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            return f"[{given if given in others else first}]"  # the bracket marks it as no field in names of errors

        return tagged_union_schema({f"[{name}]": handler.generate_schema(it) for name, it in kinds.items()}, tag)


class TextPart(MarkedBody):
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(MarkedBody):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


Parts = Annotated[list[Annotated[TextPart | RefusalPart, ByType()]], Field(max_length=MAX_PARTS, fail_fast=True)]


class NamedFunction(MarkedBody):
    name: FunctionName

    def within(self, namespace: str | None) -> Self:
        """Return the function under the name that the target is told."""
        return self.model_copy(update={"name": f"{namespace}__{self.name}"}) if namespace else self


class Function(NamedFunction):
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object; absent: no parameters.")
    strict: bool | None = Field(None, description="Refuse keywords that grammars lack; otherwise they hold nothing.")

    @model_validator(mode="after")
    def _object(self) -> Function:
        if (self.parameters or {}).get("type", "object") != "object":
            raise ValueError("parameters must be a schema of an object")
        return self

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        given = self.parameters or {"properties": {}, "additionalProperties": False}
        return {"type": "object", **(given if self.strict else lenient(given))}


class Tool(MarkedBody):
    type: Literal["function"]
    function: Function


class ToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools = Field(description="All tools are in the prompt, and these can be called.")


class CalledFunction(NamedFunction):
    arguments: str = Field(description="A JSON object.")

    def read(self) -> dict[str, Any]:
        """Return the arguments; if the limit of tokens cut them, those that are whole: agents drop what tells of it."""
        text = self.arguments.strip() or "{}"
        check_counts(text.encode(), field="arguments")
        try:
            values = from_json(text)
        except ValueError as error:
            values = from_json(text, allow_partial=True) if "EOF" in str(error) else None
        if not isinstance(values, dict):
            raise ValueError("arguments must be a JSON object")
        return values

    @model_validator(mode="after")
    def _object(self) -> CalledFunction:
        self.read()
        return self


class ToolCall(MarkedBody):
    id: str = Field(max_length=OTHER)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(MarkedBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    refusal: str | None = Field(None, description="Of an assistant: a further line of its text.")
    reasoning_content: str | None = Field(None, description="Of an answer, for templates that show it.")
    reasoning: str | None = Field(None, description="vLLM's name of reasoning_content.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=OTHER)
    name: str | None = Field(None, max_length=LONGEST["name"], description="Ignored: chat templates have no names.")

    @model_validator(mode="after")
    def _whole(self) -> Message:
        said = self.tool_calls or self.refusal
        if self.content is None and not (said or self.reasoning_content or self.reasoning):
            raise ValueError("content is required in a message without tool_calls")
        if said and self.role != "assistant":
            raise ValueError("tool_calls and a refusal are those of an assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id is required in messages of tools, and only there")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        texts += [self.refusal] if self.refusal else []
        plain: dict[str, Any] = {"role": self.role.replace("developer", "system"), "content": "\n".join(texts)}
        if thoughts := self.reasoning_content or self.reasoning:
            plain["reasoning_content"] = thoughts
        if self.tool_calls:
            plain["tool_calls"] = [
                {"id": it.id, "type": it.type, "function": {"name": it.function.name, "arguments": it.function.read()}}
                for it in self.tool_calls
            ]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class ChatFields(Body):
    """Messages of a chat, and how they become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES + 1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool = Field(True, description="The prompt ends where the assistant's answer begins.")
    continue_final_message: bool = Field(False, description="Continue the last one; add_generation_prompt is false.")
    reasoning_effort: Effort | None = Field(None, description="For the chat template; none: it shall not ask to think.")
    verbosity: Verbosity | None = Field(None, description="For the chat template.")
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Return further variables of the chat template; those that are named precede what an effort means."""
        effort, named = self.reasoning_effort, self.chat_template_kwargs or {}
        own = {"verbosity": self.verbosity, "reasoning_effort": effort, "enable_thinking": effort and effort != "none"}
        return {str(name): value for name, value in (*own.items(), *named.items()) if value is not None}

    @model_validator(mode="after")
    def _one_end_and_distinct_tools(self) -> ChatFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        if len({tool.function.name for tool in self.tools or ()}) < len(self.tools or ()):
            raise ValueError("tools must have names of their own")
        return self


class ChatBody(ChatFields, ChatOptions):
    """`POST /v1/chat/completions`."""

    tool_choice: Literal["none", "auto", "required"] | Annotated[ToolChoice | AllowedChoice, ByType()] | None = Field(
        None, description="A call is possible with auto, the default with tools, and certain with required or a name."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call in an answer.")

    @model_validator(mode="after")
    def _choice(self) -> ChatBody:
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice required needs tools")
        if not {tool.function.name for tool in self.tools or ()}.issuperset(self.chosen):
            raise ValueError("tool_choice needs names of tools")
        return self

    @property
    def calls_required(self) -> bool | None:
        """Return whether the answer must call a tool; None: it must not."""
        if not self.tools or self.tool_choice == "none":
            return None
        choice = self.tool_choice
        return (choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice) not in (None, "auto")

    @property
    def formatted(self) -> bool:
        """Return whether an answer that calls no tool has a format, while tools can be called."""
        given = self.structured_outputs or (self.response_format and self.response_format.type != "text")
        return self.calls_required is False and bool(given)

    @property
    def chosen(self) -> list[str]:
        """Return the names of the only tools that can be called; without any of them all can."""
        choice = self.tool_choice
        among = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else [choice]
        return [it.function.name for it in among if isinstance(it, ToolChoice)]

    @property
    def callable_tools(self) -> list[Tool]:
        return [tool for tool in self.tools or () if tool.function.name in (self.chosen or [tool.function.name])]


class _TextTokensBody(Body):
    model: str | None = Field(None, max_length=LONGEST["model"])
    return_token_strs: bool | None = Field(None, description="Also return each token as the vocabulary writes it.")


class TokenizeTextBody(_TextTokensBody):
    """`POST /tokenize` of a text."""

    prompt: str
    add_special_tokens: bool = Field(True, description="Add what the tokenizer adds to every text.")


class TokenizeChatBody(ChatFields, _TextTokensBody):
    """`POST /tokenize` of a chat."""

    add_special_tokens: Annotated[Literal[False], Flag] = Field(False, description="Templates write special tokens.")


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    most_values: ClassVar[int] = CompletionBody.most_values
    model: str | None = Field(None, max_length=LONGEST["model"])
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
