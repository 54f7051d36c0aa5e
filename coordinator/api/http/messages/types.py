"""Types of the replies of Anthropic's API: the message, its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from coordinator.api.http.responses import AnswerMetrics


class ThinkingDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: Annotated[int, Field(description="Tokens of the prompt that were not read from the cache")]
    cache_creation_input_tokens: Annotated[int, Field(description="0: they are not counted")]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class MessageBlock(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[Annotated[str, Field(description="Of thinking: says nothing.")]]
    id: NotRequired[Annotated[str, Field(description="Of a call, for the block with its result.")]]
    name: NotRequired[str]
    input: NotRequired[Annotated[dict[str, Any], Field(description="Of a call: its arguments.")]]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ModelMessage(TypedDict):
    """One answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: Annotated[str | None, Field(description="The one that ended the answer.")]
    usage: MessageUsage
    metrics: NotRequired[AnswerMetrics]


class ModelMessageEvent(TypedDict):
    """One event of a stream. Its type says which fields it has, as Anthropic documents them."""

    type: str
    message: NotRequired[ModelMessage]
    index: NotRequired[int]
    content_block: NotRequired[MessageBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    metrics: NotRequired[AnswerMetrics]


class TokenCount(TypedDict):
    input_tokens: int
