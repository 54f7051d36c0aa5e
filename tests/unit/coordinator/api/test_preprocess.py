"""Where requests are read, and what they leave out: beside the event loop, and huge ones one after the other."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.replies import plan_chat
from coordinator.api.http.answer import requests_of
from coordinator.api.http.bodies import CompletionBody
from coordinator.api.http.replies import plan_completion
from coordinator.api.preprocess import resolve
from coordinator.api.service import from_proto
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target
from outrider.base.aio import HUGE_BYTES, LARGE_BYTES, beside
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo, SamplingDefaults
from outrider.protocol.vocabulary import Vocabulary
from outrider.security.tenants import Tenant, set_tenant, tenant
from outrider.settings.coordinator import CoordinatorSettings
from outrider.speculation.grammar import GrammarCompiler
from outrider.testing.toy_models import byte_tokenizer
from outrider.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(("size", "most"), [(HUGE_BYTES, 3), (HUGE_BYTES + 1, 1)])
async def test_huge_requests_take_their_memory_one_after_the_other(size: int, most: int) -> None:
    together, seen, lock, all_there = 0, [], threading.Lock(), threading.Barrier(most)

    def work(name: str) -> str:
        nonlocal together
        with lock:
            together += 1
            seen.append(together)
        all_there.wait(10)
        time.sleep(0.05)
        with lock:
            together -= 1
        return f"{name} of {tenant().id}"

    set_tenant(Tenant("alice"))
    assert await asyncio.gather(*(beside(size, work, name) for name in "abc")) == [f"{it} of alice" for it in "abc"]
    assert max(seen) == most


@pytest.mark.parametrize(
    "body",
    [
        CompletionBody(prompt=["x" * (LARGE_BYTES // 4)] * 4),
        ChatBody.model_validate(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * LARGE_BYTES}]}]}
        ),
    ],
    ids=["small prompts", "chat"],
)
async def test_no_text_of_a_large_body_is_read_in_the_event_loop(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen prompts of 16,000 characters took a quarter of a second there, a million texts of a tool five."""
    seen: list[tuple[str, threading.Thread]] = []

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*given: Any, **more: Any) -> Any:
            seen.append((name, threading.current_thread()))
            return work(*given, **more)

        monkeypatch.setattr(owner, name, watched)

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    info = ModelInfo("toy", "f", vocab_size=len(tokenizer), context_length=1 << 20)
    nothing: Any = None
    target, settings = Target(info, tokenizer, Vocabulary.of(tokenizer), nothing), CoordinatorSettings()
    size = len(body.model_dump_json())
    plan: Any = plan_chat if isinstance(body, ChatBody) else plan_completion
    inputs, _ = await beside(size, plan, body, target, settings)
    for owner, name in ((type(tokenizer), "_encode_plus"), (Chat, "texts")):
        watch(owner, name)
    assert await requests_of(body, size, inputs, target, settings)
    assert {name for name, _ in seen} >= {"_encode_plus"}
    assert not [name for name, thread in seen if thread is threading.main_thread()]


@pytest.mark.parametrize(
    ("given", "settings", "expected"),
    [
        ({}, {}, (0.6, 20, 0.9, 0.05, 1.1)),
        ({"temperature": 0, "top_k": -1, "top_p": 1.0}, {}, (0.0, 0, 1.0, 0.05, 1.1)),
        ({"temperature": None, "min_p": 0, "repetition_penalty": 1}, {}, (0.6, 20, 0.9, 0.0, 1.0)),
        ({}, {"sampling_defaults": "openai"}, (1.0, 0, 1.0, 0.0, 1.0)),
        ({"top_k": 5}, {"sampling_defaults": "openai"}, (1.0, 5, 1.0, 0.0, 1.0)),
    ],
)
def test_sampling_is_a_requests_then_the_models_then_openais(
    given: dict[str, Any], settings: dict[str, Any], expected: tuple[float, ...]
) -> None:
    recommended = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    nothing: Any = None
    target = Target(ModelInfo("toy", "f", sampling=recommended), byte_tokenizer(), nothing, nothing)
    body = CompletionBody.model_validate({"prompt": "a", **given})
    [request], _ = plan_completion(body, target, CoordinatorSettings(**settings))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    assert tuple(getattr(request.params, name) for name in names) == expected


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"min_tokens": 9, "max_tokens": 9, "ignore_eos": True}, True),
        ({"min_tokens": 0}, True),
        ({"min_tokens": None}, True),
        ({"min_tokens": 10, "max_tokens": 9, "ignore_eos": True}, False),
        ({"min_tokens": 1, "ignore_eos": True}, False),
        ({"min_tokens": 1, "max_tokens": 9}, False),
        ({"min_tokens": 1, "max_tokens": 9, "ignore_eos": True, "stop": "a"}, False),
        ({"min_tokens": 1, "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [3]}, False),
        ({"min_tokens": 1, "max_tokens": 9, "ignore_eos": True, "response_format": {"type": "json_object"}}, False),
    ],
)
def test_a_least_number_of_tokens_is_taken_where_nothing_else_ends_an_output(
    given: dict[str, Any], taken: bool
) -> None:
    """Benchmark tools send it beside `ignore_eos`."""
    nothing: Any = None
    target = Target(ModelInfo("toy", "f"), byte_tokenizer(), nothing, nothing)
    body = CompletionBody.model_validate({"prompt": "a", **given})
    with nullcontext() if taken else pytest.raises(InvalidRequest, match="min_tokens is"):
        plan_completion(body, target, CoordinatorSettings())
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools, **given})
    with nullcontext() if not given["min_tokens"] else pytest.raises(InvalidRequest, match="min_tokens is"):
        plan_chat(chat, target, CoordinatorSettings())


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_completion_follows_its_whole_format_or_is_refused(strict: bool | None) -> None:
    """Over chats and responses, what grammars lack holds nothing unless a format is strict."""
    tokenizer = byte_tokenizer()
    grammars = GrammarCompiler(lambda: tokenizer_json(tokenizer), [tokenizer.eos_token_id])
    nothing: Any = None
    target = Target(ModelInfo("m", "f", vocab_size=300, context_length=99), tokenizer, nothing, grammars)

    def ready(kind: type[ChatBody] | type[CompletionBody], plan: Any, **schema: Any) -> Any:
        form = {"name": "f", "schema": {"type": "array", **schema}, "strict": strict}
        wanted = {"response_format": {"type": "json_schema", "json_schema": form}}
        asked = {"prompt": "a"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}
        [request], _ = plan(kind.model_validate(asked | wanted), target, CoordinatorSettings())
        return resolve(replace(request, input="a"), target, CoordinatorSettings())

    assert ready(CompletionBody, plan_completion, maxItems=2)
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        ready(CompletionBody, plan_completion, uniqueItems=True)
    with pytest.raises(InvalidRequest, match="uniqueItems") if strict else nullcontext():
        ready(ChatBody, plan_chat, uniqueItems=True)


@pytest.mark.parametrize("strict", [True, False])
def test_a_chat_has_the_same_messages_over_both_protocols(strict: bool) -> None:
    """Templates that take one message of the system refused or lost the second one of a chat over gRPC."""
    tokenizer = byte_tokenizer()
    rule = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}" * strict
    tokenizer.chat_template = f"{{% for m in messages %}}{rule}{{{{ m.content }}}}{{% endfor %}}"
    nothing: Any = None
    target = Target(ModelInfo("toy", "f"), tokenizer, nothing, nothing)
    roles = ["system", "developer", "user", "assistant", "system", "user"]
    said = [{"role": role, "content": f"{number}."} for number, role in enumerate(roles)]
    told = from_proto(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(**it) for it in said])), target).input
    [asked], _ = plan_chat(ChatBody.model_validate({"messages": said}), target, CoordinatorSettings())
    assert isinstance(told, Chat)
    assert isinstance(asked.input, Chat)
    assert told.messages == asked.input.messages
    assert [it["content"] for it in told.messages] == (
        ["0.\n\n1.\n\n4.", "2.", "3.", "5."] if strict else ["0.\n\n1.", "2.", "3.", "4.", "5."]
    )
