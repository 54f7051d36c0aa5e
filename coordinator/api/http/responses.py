"""Bodies of responses. Handlers return these types, and the OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from outrider.protocol.speculation import TokenKind

# --- metrics and usage ---------------------------------------------------------------------------------------


class PromptDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Annotated[int, Field(description="0: they are not counted")]


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculativeDecoding(TypedDict):
    """Acceptance of one request, as vLLM reports it."""

    mean_acceptance_length: Annotated[float, Field(description="1 + accepted tokens per speculative step")]
    draft_acceptance_rate: Annotated[float, Field(description="Accepted tokens per guessed token; 0 without any")]
    acceptance_histogram: Annotated[
        list[int], Field(description="[j]: steps that accepted j guesses; num_spec_tokens + 1 entries")
    ]
    num_spec_steps: Annotated[int, Field(description="Steps that had guesses to check")]
    num_accepted_draft_tokens: int
    num_draft_tokens: Annotated[int, Field(description="Guessed tokens, along the longest path of each step")]
    num_spec_tokens: Annotated[int, Field(description="Tokens of the longest guess that a step checked")]


class PlanSteps(TypedDict):
    plan: str
    steps: int


class SessionMetrics(TypedDict):
    tokens_per_second: float
    time_to_first_token_ms: float
    steps: int
    mean_gamma: float
    drafter: str
    plans: list[PlanSteps]
    bytes_per_accepted_token: float
    failovers: int
    drafter_losses: int
    seed: Annotated[int, Field(description="Given or drawn; it reproduces the text in greedy and coupled mode")]
    session_id: str


class AnswerMetrics(TypedDict):
    speculative_decoding: SpeculativeDecoding
    outrider: SessionMetrics


class ChunkSpeculation(TypedDict):
    kinds: list[Annotated[str, Field(json_schema_extra={"enum": [kind.name.lower() for kind in TokenKind if kind]})]]
    characters: Annotated[list[int], Field(description="Characters of the chunk's text, per token")]
    token_ids: list[int]
    plan: str
    gamma: int


class PromptLogprob(TypedDict):
    logprob: float
    rank: Annotated[int | None, Field(description="Among all tokens; null: it is not among those that are told")]
    decoded_token: str


class TokenDetails(TypedDict, total=False):
    token_ids: list[int]
    prompt_token_ids: Annotated[list[int], Field(description="Of completions, in the first chunk")]
    speculation: Annotated[ChunkSpeculation, Field(description="In chunks")]
    prompt_logprobs: Annotated[list[dict[str, PromptLogprob] | None], Field(description="Of completions, by ids")]


# --- answers ---------------------------------------------------------------------------------------------------------

FinishName = Literal["stop", "length", "tool_calls"]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ContentLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: Annotated[list[float | None], Field(description="null for the first token of a prompt")]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ToolCallFunction(TypedDict, total=False):
    name: str
    arguments: Annotated[str, Field(description="A JSON object; in chunks a part of it")]


class ToolCallDelta(TypedDict, total=False):
    index: int
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="null in an answer of tool calls alone")]
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChoice(TokenDetails):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName


class ChatChunkChoice(TokenDetails):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None


class CompletionChoice(TokenDetails):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName


class CompletionChunkChoice(TokenDetails):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None


class _Head(TypedDict):
    id: str
    prompt_token_ids: NotRequired[Annotated[list[int], Field(description="Of chats, in the first chunk")]]
    created: int
    model: str
    system_fingerprint: Annotated[str, Field(description="Equal ones, prompts, parameters and seeds give equal texts")]
    metrics: NotRequired[AnswerMetrics]


class _Answer(_Head):
    usage: Usage


class _Chunk(_Head):
    usage: NotRequired[Usage | None]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


# --- information -----------------------------------------------------------------------------------------------------


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: Annotated[str, Field(description="The target's own name, if served under another")]
    max_model_len: int
    fingerprint: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class FleetWorker(TypedDict):
    worker_id: str
    role: Literal["verifier", "drafter"]
    address: str
    kind: str
    capacity: int
    draining: bool
    round_trip_ms: float
    model: dict[str, Any]
    load: dict[str, Any]


class Fleet(TypedDict):
    version: str
    coordinator_id: str
    sessions: int
    durable: Annotated[bool, Field(description="Sessions survive this coordinator")]
    workers: list[FleetWorker]


class Status(TypedDict):
    status: str


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorDetail
    type: NotRequired[Annotated[Literal["error"], Field(description="Only of /v1/messages")]]
    request_id: NotRequired[Annotated[str, Field(description="Only of /v1/messages")]]
