"""Truncation of chats: what is left out, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.api.http.agents.response_events import plan_response
from coordinator.api.http.agents.truncation import shortened
from coordinator.api.preprocess import resolve
from coordinator.workers.target import Target
from outrider.protocol.errors import ContextExceeded
from outrider.protocol.fleet import ModelInfo
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer

SETTINGS, NOTHING = CoordinatorSettings(), [None] * 2
INFO = ModelInfo("m", "f", vocab_size=257, context_length=1024)
TARGET = Target(INFO, byte_tokenizer(), *NOTHING)  # type: ignore[arg-type]


def told(items: Sequence[Any], **more: Any) -> list[str]:
    """What is left of items, step by step, each message as a letter of its role and its text or its call."""
    chat = ResponsesBody.model_validate({"input": items, **more}).chat
    left = []
    for each in shortened(chat):
        names = []
        for it in each.messages:
            calls = "".join(call.id for call in it.tool_calls or ())
            names.append(f"{it.role[0]}{calls or it.tool_call_id or it.content}")
        left.append(" ".join(names))
    return left


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(id_: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"}


def output(id_: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": "x"}


def test_whole_turns_are_left_out_first() -> None:
    items = [user("1"), {"role": "assistant", "content": "2"}, user("3"), call("A"), output("A"), user("5")]
    assert told(items, instructions="I") == ["sI u1 a2 u3 aA tA u5", "sI u3 aA tA u5", "sI u5"]


def test_of_the_last_turn_the_message_stays_and_calls_go_with_their_outputs() -> None:
    items = [user("1"), call("A"), call("B"), output("A"), output("B"), call("C"), output("C")]
    assert told(items) == ["u1 aAB tA tB aC tC", "u1 aAB tA tB aC tC", "u1 aC tC"]


def test_an_output_keeps_its_call_in_any_order() -> None:
    """Ids may come again, as those of servers that count the calls of each answer."""
    items = [call("A"), user("1"), output("A"), user("2"), call("A"), output("A"), user("3")]
    assert told(items) == ["u2 aA tA u3", "u3"]


def test_a_call_without_an_output_waits_for_none_of_an_earlier_turn() -> None:
    items = [user("1"), call("A"), output("A"), user("2"), call("A"), user("3"), user("4")]
    assert told(items) == ["u1 aA tA u2 aA u3 u4", "u2 aA u3 u4", "u3 u4", "u4"]


def test_instructions_among_the_items_stay() -> None:
    items = [{"role": "developer", "content": "D"}, user("1"), {"role": "system", "content": "S"}, user("2")]
    assert told(items) == ["dD u1 sS u2", "dD sS u2"]
    assert told([{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}]) == ["a1 a2", "a2"]


@pytest.mark.parametrize(("turns", "kept"), [(1, 1), (10, 10), (64, 18), (500, 18)])
def test_what_fits_is_encoded_once(turns: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search took that many encodings, and the request a further one of the same chat."""
    encode, texts = Target.encode_chat, list[str]()

    def noted(self: Target, chat: Any, *limit: int) -> Any:
        texts.append(str(chat))
        return encode(self, chat, *limit)

    monkeypatch.setattr(Target, "encode_chat", noted)
    given = [user("x" * 35) for _ in range(turns)]  # 42 tokens each, and 11 after them
    body = ResponsesBody.model_validate({"input": given, "max_output_tokens": 250, "truncation": "auto"})
    [request], _ = plan_response(body, body.chat, TARGET, SETTINGS)
    assert len(resolve(request, TARGET, SETTINGS).prompt) == 42 * kept + 11
    assert len(texts) == len({*texts}) <= 1 + turns.bit_length()
    assert (len(texts) == 1) == (turns == kept)


def test_of_chats_that_never_fit_the_shortest_is_refused() -> None:
    for given in ([user("x" * 2_000)], [user("y"), user("x" * 2_000)], [{"role": "system", "content": "x" * 2_000}]):
        body = ResponsesBody.model_validate({"input": given, "truncation": "auto"})
        [request], _ = plan_response(body, body.chat, TARGET, SETTINGS)
        with pytest.raises(ContextExceeded, match="prompt is 20"):
            resolve(request, TARGET, SETTINGS)
