"""Events of messages, as the answers of noise and of models that think would have them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.calls.forms import HERMES
from coordinator.api.http.agents.manners import TextManner
from coordinator.api.http.messages import replies
from coordinator.api.http.messages.replies import MessageReplies
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import SessionOutput
from coordinator.sessions.session import Session
from coordinator.workers.target import Target
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.testing.toy_models import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


async def answer(
    monkeypatch: pytest.MonkeyPatch, text: str, *, stop: str = "", reason: FinishReason = FinishReason.STOP
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message with this text, and the events of its stream."""
    nothing: Any = None
    info: Any = SimpleNamespace(fingerprint="fp")
    target = Target(info, byte_tokenizer(), nothing, nothing, served_name="m")
    chat = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "Hi."}], "tools": TOOLS, "max_tokens": 9_000}
    )
    monkeypatch.setattr(replies, "metrics", lambda _: {"metrics": {}})

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Sequence[Session]]:
        request = SimpleNamespace(prompt=(1, 2, 3), params=SimpleNamespace(max_tokens=9_000))
        record = SimpleNamespace(session_id="s", finish_reason=reason, tokens=(), request=request)
        output = SessionOutput(TextStream(target.decode, (), (stop,) if stop else ()))
        tokens = target.encode(text)
        output.append(tokens, [TokenKind.PLAIN] * len(tokens))
        output.end(finished=True)
        stats = SimpleNamespace(cached_tokens=2)
        made = SimpleNamespace(target=target, record=record, output=output, error=None, stats=stats)
        yield [cast(Session, made)]

    manner = TextManner(HERMES, knows_tools=True, thinks=True)
    one, other = (MessageReplies(chat, target, *manner.parsers({"f": {}, "g": {}}, chat, target)) for _ in range(2))
    return await one.whole(answering()), [event async for event in other.chunks(answering())]


async def test_blocks_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>\n' for name in ("f", "g")
    )
    whole, events = await answer(monkeypatch, f"<think>Hm.</think>So. {calls}")
    thought, said, *called = whole["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    assert said == {"type": "text", "text": "So. "}
    assert [(block["name"], block["input"]) for block in called] == [("f", {"a": 1}), ("g", {"a": 1})]
    assert len({block["id"] for block in called}) == 2
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    kinds = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in events]
    assert [kind for kind in kinds if kind[0] in ("start", "stop")] == [
        (kind, number) for number in range(4) for kind in ("start", "stop")
    ]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert whole["usage"] == events[-2]["usage"]
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": "xy', {}),
        ("", {}),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}}\n</tool_call>", {}),
        ('{"a": ' + "9" * 5_000 + "}}\n</tool_call>", {}),
        ('{"a": [1e999, -1e999]}}\n</tool_call>', {"a": [1.7976931348623157e308, -1.7976931348623157e308]}),
    ],
)
async def test_arguments_are_read_as_far_as_they_are_whole(
    monkeypatch: pytest.MonkeyPatch, arguments: str, read: dict[str, Any]
) -> None:
    """JSON has no infinite numbers: an answer with one could not be written."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments or "{"}'
    reason = FinishReason.STOP if "</tool_call>" in arguments else FinishReason.LENGTH
    whole, _ = await answer(monkeypatch, text, reason=reason)
    [call] = whole["content"]
    assert call["input"] == read
    assert whole["stop_reason"] == ("tool_use" if reason is FinishReason.STOP else "max_tokens")


async def test_an_answer_without_a_block_has_an_empty_text(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, events = await answer(monkeypatch, "")
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": ""}], "end_turn")
    kinds = [event["type"] for event in events]
    assert kinds[2:] == ["content_block_start", "content_block_stop", "message_delta", "message_stop"]


async def test_the_stop_sequence_that_ended_an_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = await answer(monkeypatch, "So it is.", stop="it")
    assert (whole["content"][0]["text"], whole["stop_reason"], whole["stop_sequence"]) == ("So ", "stop_sequence", "it")
