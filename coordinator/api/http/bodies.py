"""Request bodies of OpenAI's API, with common vLLM extensions and Outrider's own.

An unsupported field that would change the answer is rejected by name; fields that only label a request are ignored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request

from coordinator.api.http.failures import FIELD_NAMES, of_validation
from coordinator.persistence.idempotency import digest_of
from coordinator.persistence.session_record import MAX_PRIORITY
from outrider.base.aio import LARGE_BYTES, beside
from outrider.protocol.errors import InvalidRequest, shorten
from outrider.protocol.field_limits import LONGEST, MOST
from outrider.protocol.sampling_params import MAX_LOGPROBS, MAX_STOP_CHARACTERS, MIN_REPETITION_PENALTY
from outrider.protocol.speculation import MAX_BRANCHES, MAX_DRAFT_WAIT_US, MAX_GAMMA

MAX_CHOICES = 16
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
MAX_PROMPTS = 256  # where `--max-request-sessions` allows as many
_ADDED = {"annotations", "parsed", "parsed_arguments", "provider_specific_fields", "thinking_blocks"}  # to answers
_SENT = {"encrypted_content", "id", "index", "logprobs", "phase"}  # with them
_LABELS = {"client_metadata", "max_tool_calls", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
_FALSE_HERE = ("include_stop_str_in_output", "use_beam_search", "early_stopping", "echo")
_TRUE_HERE = ("skip_special_tokens", "spaces_between_special_tokens", "separate_reasoning", "include_reasoning")
# Of vLLM and SGLang, with the values that hold for any answer here: some clients send all fields with their defaults.
_HOLDS: dict[str, Any] = dict.fromkeys(_TRUE_HERE, True) | dict.fromkeys(_FALSE_HERE, False)
_HOLDS |= {"return_tokens_as_token_ids": False, "length_penalty": 1, "bad_words": [], "top_logprobs": 0}
_PIECE = 1 << 16
_MAX_TOKENS = 2**31 - 1

BodyModel = TypeVar("BodyModel", bound="Body")


def _whole(value: Any) -> Any:
    """Convert whole floats to integers: JSON has one number type."""
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _may_be(expected: Any, value: Any) -> bool:
    """Return whether a further field may have a value. True equals 1 in Python, and differs in JSON."""
    return expected is ... or (_whole(value) == expected and isinstance(value, bool) == isinstance(expected, bool))


def _few(value: Any) -> Any:
    """Check the number of entries before validating each of them."""
    if isinstance(value, dict) and len(value) > MOST["logit_bias"]:
        raise ValueError(f"{len(value)} biases, at most {MOST['logit_bias']} are taken")
    return value


Unkept = AfterValidator(lambda _: None)  # of what is ignored: an answer may take minutes, and this megabytes
Flag = BeforeValidator(lambda value: value if isinstance(value, bool) else f"{value}")  # of a literal: 1 equals true
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# The first error ends validation: collecting a million of them takes seconds and gigabytes.
_TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    most_values: ClassVar[int] = 1 << 16
    passes: ClassVar[dict[str, Any]] = {}  # the only value of a further field; the ellipsis: any value

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Raise for the first unknown field before validating the others."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        # Null changes nothing: newer clients have more fields. Those of another type are named by that.
        given = (name for name, value in data.items() if value is not None and name not in known)
        unknown = next((name for name in given if not _may_be(cls.passes.get(name), data[name])), None)
        kinds = get_args(known["type"].annotation) if "type" in known else ()
        if unknown is not None and (not kinds or data.get("type", kinds[0]) in kinds):
            fault = InitErrorDetails(type="extra_forbidden", loc=(unknown,), input=data[unknown])
            if unknown in cls.passes:
                fault |= {"type": "literal_error", "ctx": {"expected": json.dumps(cls.passes[unknown])}}
            raise ValidationError.from_exception_data(cls.__name__, [fault])
        return {name: _whole(value) for name, value in data.items() if name in known}


class MarkedBody(Body):
    """A message, a tool or a part of it: clients send back what they or other servers added to it."""

    passes: ClassVar[dict[str, Any]] = dict.fromkeys(_ADDED | _SENT | {"cache_control", "prompt_cache_breakpoint"}, ...)


async def read_body(request: Request, *kinds: type[BodyModel]) -> BodyModel:
    """Return the body of a request, as the first of these kinds that has all of its required fields."""
    FIELD_NAMES.set({})  # a pipelined request begins within the context of the one before
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HTTPException(415, f"Content-Type is {shorten(media) or 'absent'}, must be application/json")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise HTTPException(415, f"Content-Encoding is {shorten(coding)}, must be absent")
    data = b"".join([part async for part in request.stream()])  # `body()` would keep it as long as the answer takes
    request.state.size = request.state.to_plan = len(data)  # planning may take longer than its bytes
    keyed = "idempotency-key" in request.headers
    request.state.sent = await beside(len(data), digest_of, request.url.path.encode() + data) if keyed else ""
    if len(data) > LARGE_BYTES:  # checks of megabytes take seconds; other streams wait for the JSON only
        return await asyncio.to_thread(_read, data, kinds)
    return _read(data, kinds)


def _read(body: bytes, kinds: Sequence[type[BodyModel]]) -> BodyModel:
    check_counts(body, kinds[0].most_values)
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {shorten(str(error))}", field="body") from error
    named = data if isinstance(data, dict) else {}
    required = {kind: {name for name, field in kind.model_fields.items() if field.is_required()} for kind in kinds}
    try:
        return next((kind for kind in kinds if required[kind] <= named.keys()), kinds[0]).model_validate(data)
    except ValidationError as error:
        raise of_validation(error) from error


def check_counts(body: bytes, most_values: int = Body.most_values, field: str = "body") -> None:
    """Raise InvalidRequest for JSON with so many values, texts aside, that parsing it would delay other requests."""
    # All else waits for the parser, for up to 4 µs a key and 0.2 µs a value.
    limits = {"values": (b",", most_values), "keys, lists and objects": (b":[{", 1 << 16)}
    found, inside, rest = dict.fromkeys(limits, 0), False, b""
    for start in range(0, len(body), _PIECE):  # one call for all of it would delay them, too
        text = (rest + body[start : start + _PIECE]).replace(rb"\\", b"")
        rest = b"\\" * text.endswith(b"\\")  # it escapes the next character
        parts = text.removesuffix(rest).replace(rb"\"", b"").split(b'"')
        outside, inside = b"".join(parts[inside::2]), inside ^ (len(parts) % 2 == 0)
        for name, (marks, most) in limits.items():
            found[name] += len(outside) - len(outside.translate(None, marks))
            if found[name] > most:
                raise InvalidRequest.of(field, f"more than {most} {name}", f"at most {most} {name}")


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole answer.")
    continuous_usage_stats: bool | None = Field(None, description="With it: the usage so far in all others, too.")
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class JsonSchema(Body):
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Absent: any JSON object.")
    description: str | None = None
    strict: bool | None = Field(None, description="Refuse what grammars lack; in chats it holds nothing otherwise.")


class ResponseFormat(Body):
    """Format of the output; `regex` is an extension."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, description="With type regex: pattern that the whole output must match.")

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        for kind, given in (("json_schema", self.json_schema), ("regex", self.regex)):
            if (self.type == kind) != (given is not None):
                raise ValueError(f"{kind} is required with type {kind}, and only there")
        return self


class StructuredOutputs(Body):
    """vLLM's form of `response_format`; exactly one field is given."""

    json_: dict[str, Any] | None = Field(None, alias="json", description="JSON schema.")
    json_object: Annotated[Literal[True], Flag] | None = None
    regex: _Text | None = Field(None, description="Pattern that the whole output must match.")
    choice: Annotated[list[_Text], Field(min_length=1, fail_fast=True)] | None = Field(None, description="Its texts.")

    @model_validator(mode="after")
    def _complete(self) -> StructuredOutputs:
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("one of json, json_object, regex and choice is required, and only one")
        return self


class SpeculationWish(Body):
    """Speculation options; in greedy and coupled mode they change speed, never text."""

    gamma: int | None = Field(None, ge=0, le=MAX_GAMMA, description="Fixes γ; 0: plain decoding; absent: adaptive.")
    branches: int | None = Field(None, ge=1, le=MAX_BRANCHES, description="Guesses for the same position.")
    ahead: bool | None = Field(None, description="The drafter continues while its guesses are checked.")
    patience_us: int | None = Field(None, ge=0, le=MAX_DRAFT_WAIT_US, description="Fixes the wait for guesses.")
    drafter: str | None = Field(None, max_length=LONGEST["drafter"], description="Only drafters of this kind.")
    verification: Literal["greedy", "coupled", "rejection", "block"] | None = None
    show: bool = Field(False, description="Each chunk lists which tokens were guessed, and the plan.")


class GenerationBody(Body):
    """Fields that chat and completions share."""

    passes: ClassVar[dict[str, Any]] = _HOLDS | dict.fromkeys(_LABELS, ...)
    model: str | None = Field(None, max_length=LONGEST["model"], description="Of /v1/models; absent: the default one.")
    temperature: float | None = Field(None, ge=0, le=10, description="0 is greedy, else at least 1e-6.")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST["stop"], fail_fast=True)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST["logit_bias"], json_schema_extra={"additionalProperties": False}),
            BeforeValidator(_few),
        ]
        | None
    ) = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Choice i of n is drawn with seed + i.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Common extensions.
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS, description="0 and -1 keep all.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=10)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST["stop_token_ids"], fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS, description="Only with ignore_eos, and with no stop.")
    cache_salt: str | None = Field(None, max_length=LONGEST["cache_salt"], description="Separates tenants' prefixes.")
    speculation: SpeculationWish | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Of its tokens; vLLM's. No stream.")
    return_token_ids: bool | None = Field(False, description="Of the output and the prompt; vLLM's.")
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower numbers are served first.")
    user: Annotated[str | None, Unkept] = Field(None, description="Ignored.")
    metadata: Annotated[dict[str, Any] | None, Unkept] = Field(None, description="Ignored.")
    store: bool | None = Field(None, description="Ignored: nothing is stored for later retrieval.")
    service_tier: Annotated[str | None, Unkept] = Field(None, description="Ignored.")
    prompt_cache_key: Annotated[str | None, Unkept] = Field(None, description="Ignored: cache_salt separates prefixes.")

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs excludes stream")
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise ValueError("structured_outputs excludes another format")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1


class OneAnswerBody(GenerationBody):
    """Fields of a body that has one answer, and no details of its tokens."""

    n: Annotated[Literal[1], BeforeValidator(lambda n: str(n) if n is True else n)] | None = None  # true is equal to 1

    @model_validator(mode="after")
    def _without_details(self) -> OneAnswerBody:
        if self.return_token_ids or self.prompt_logprobs is not None or (self.speculation and self.speculation.show):
            raise ValueError("speculation.show, prompt_logprobs and return_token_ids need a chat or a completion")
        return self


class ChatOptions(GenerationBody):
    """Fields of a chat, besides its messages and tools."""

    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prediction: Annotated[dict[str, Any] | None, Unkept] = Field(None, description="Ignored: the drafters guess.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> ChatOptions:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same field and differ")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    most_values: ClassVar[int] = 1 << 20  # token ids
    prompt: (
        _Text
        | _TokenIds
        | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS, description=f"Default {DEFAULT_TOKENS}; 0 with echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="The prompt before the output, with its log probabilities.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Only equal to n.")
    suffix: Literal[""] | None = Field(None, description="Not supported: only empty.")

    @model_validator(mode="after")
    def _whole(self) -> CompletionBody:
        if self.best_of not in (None, self.choices):
            raise ValueError("best_of must equal n: no further answers are drawn")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    @property
    def limit(self) -> int | None:
        return 1 if self.echo and self.max_tokens == 0 else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
