"""Responses: the log probabilities of a text and of no more, and what they repeat of a request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import AddedToken

from coordinator.api.http import streams
from coordinator.api.http.agents import response_events
from coordinator.api.http.agents.calls.forms import HERMES
from coordinator.api.http.agents.manners import HARMONY, HarmonyManner, TextManner
from coordinator.api.http.agents.parser import Parser
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.agents.response_events import ResponseReplies
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import SessionOutput
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason, TokenKind, TokenLogprobs
from outrider.protocol.vocabulary import Vocabulary
from outrider.testing.toy_models import byte_tokenizer
from tests.harmony import harmony_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def events_of(
    text: str, target: Target, manner: TextManner | HarmonyManner, more: Any = ()
) -> list[dict[str, Any]]:
    """The events of an answer as clients read them; the log probability of a token is its place."""
    given = {"input": "Hi.", "include": ["message.output_text.logprobs"], **dict(more)}
    body = ResponsesBody.model_validate(given)
    tokens = target.tokenizer.encode(text, add_special_tokens=False)
    output = SessionOutput(TextStream(target.decode, (), ()))
    output.append(tokens, [TokenKind.PLAIN] * len(tokens), [TokenLogprobs(-float(at)) for at in range(len(tokens))])
    output.end(finished=True)
    request = SimpleNamespace(prompt=(1,), params=SamplingParams())
    record = SimpleNamespace(session_id="s", finish_reason=FinishReason.STOP, tokens=tokens, request=request)
    session = SimpleNamespace(
        target=target, record=record, output=output, error=None, stats=SimpleNamespace(cached_tokens=0)
    )

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Sequence[Session]]:
        yield [cast(Session, session)]

    schemas = {tool.function.name: tool.function.schema_of_arguments for tool in body.chat.callable_tools}
    [parser] = manner.parsers(schemas, body.chat, target)
    replies = ResponseReplies(body, target, parser)
    written = [streams._event(event) async for event in replies.chunks(answering())]
    return [json.loads(event.partition(b"data: ")[2]) for event in written]


@pytest.fixture(autouse=True)
def no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_events, "metrics", lambda _: {})


def target_of(tokenizer: Any) -> Target:
    nothing: Any = None
    info: Any = SimpleNamespace(fingerprint="fp")
    return Target(info, tokenizer, Vocabulary.of(tokenizer), nothing, served_name="m")


@pytest.mark.parametrize("special", [False, True])
async def test_thoughts_marks_and_calls_have_no_log_probabilities(*, special: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(it, special=special) for it in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    target = target_of(tokenizer)
    manner = TextManner(HERMES, knows_tools=True, thinks=True)
    text = f"<think>Hm. 世</think>So 世界. {CALL}"
    events = await events_of(text, target, manner, {"tools": [TOOL]})
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "So 世界. "
    assert (
        bytes(byte for event in deltas for token in event["logprobs"] for byte in token["bytes"])
        == "So 世界. ".encode()
    )
    thought = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert thought
    assert all("logprobs" not in event for event in thought)
    message = next(item for item in events[-1]["response"]["output"] if item["type"] == "message")
    known = message["content"][0]["logprobs"]
    assert known == [token for event in deltas for token in event["logprobs"]]
    assert [token["logprob"] for token in known] == sorted((token["logprob"] for token in known), reverse=True)


async def test_headers_of_harmony_have_no_log_probabilities() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
    events = await events_of(
        text, target_of(harmony_tokenizer()), HarmonyManner(HARMONY, knows_tools=True, thinks=True)
    )
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(token["token"] for event in deltas for token in event["logprobs"]) == "So."


async def test_an_answer_in_calls_alone_stays_one() -> None:
    events = await events_of(CALL, target_of(byte_tokenizer()), TextManner(HERMES, knows_tools=True), {"tools": [TOOL]})
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]


async def test_what_the_request_gave_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, encode = list[str](), streams._text

    def noted(value: Any) -> str:
        calls.append(encode(value))
        return calls[-1]

    monkeypatch.setattr(streams, "_text", noted)
    more = {"instructions": "Be short.", "tools": [TOOL], "metadata": {"a": "b"}}
    events = await events_of("So.", target_of(byte_tokenizer()), TextManner(HERMES, knows_tools=True), more)
    repeated = [event["response"] for event in events if "response" in event]
    assert len(repeated) == 3
    for response in repeated:
        assert (response["instructions"], response["metadata"]) == ("Be short.", {"a": "b"})
        assert response["tools"][0]["name"] == "f"
        assert (response["truncation"], response["top_logprobs"]) == ("disabled", 0)
    assert sum("Be short." in call for call in calls) == 1
    assert sum('"parameters"' in call for call in calls) == 1


def test_absent_fields_are_repeated_with_what_they_mean() -> None:
    given = ResponseReplies(
        ResponsesBody.model_validate({"input": "Hi.", "tools": None}),
        target_of(byte_tokenizer()),
        Parser(),
    )._given
    assert {name: json.loads(it.text) for name, it in given.items()} == {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": None,
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
