"""Types of the replies of `/v1/responses`: the response, its items and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from coordinator.api.http.responses import AnswerMetrics, CompletionDetails, PromptDetails


class ItemPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class OutputItem(TypedDict):
    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Annotated[Literal["assistant"], Field(description="Of a message.")]]
    content: NotRequired[Annotated[list[ItemPart], Field(description="Of a message or reasoning: one part.")]]
    summary: NotRequired[Annotated[list[Any], Field(description="Of reasoning: empty.")]]
    call_id: NotRequired[Annotated[str, Field(description="Of a call, for the item with its output.")]]
    name: NotRequired[Annotated[str, Field(description="Of a call.")]]
    namespace: NotRequired[Annotated[str, Field(description="Of a call, if its tool is in one.")]]
    arguments: NotRequired[Annotated[str, Field(description="Of a call: a JSON object.")]]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ModelResponse(TypedDict):
    """One answer. It repeats the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Annotated[dict[str, str] | None, Field(description="With code and message, where it failed.")]
    incomplete_details: Annotated[dict[str, str] | None, Field(description="With reason max_output_tokens.")]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] | None
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    metrics: NotRequired[AnswerMetrics]


class ModelResponseEvent(TypedDict):
    """One event of a stream. Its type says which fields it has, as OpenAI documents them."""

    type: str
    sequence_number: int
    response: NotRequired[ModelResponse]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    part: NotRequired[ItemPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[Any]]
    name: NotRequired[str]
    arguments: NotRequired[str]
