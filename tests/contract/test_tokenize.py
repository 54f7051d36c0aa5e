"""Texts and chats as tokens and back, in vLLM's shapes; answers that continue the client's last message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.contract.conftest import House

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "Grüße 世界 🙂 <|end|>"
CHAT: list[Any] = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def web(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=30) as made:
        yield made


async def tokenized(web: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await web.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def test_a_text_becomes_tokens_and_the_tokens_become_the_text(web: httpx.AsyncClient, house: House) -> None:
    target = house.service.sessions.targets.named("")
    found = await tokenized(web, prompt=TEXT, model=target.info.name, return_token_strs=True)
    assert found["tokens"] == list(target.encode(TEXT))
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == target.info.context_length
    assert found["token_strs"][-1] == "<|end|>"
    back = await web.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": TEXT}, "with control tokens"
    assert await tokenized(web, prompt="") == found | {"count": 0, "tokens": [], "token_strs": None}


async def test_a_chat_becomes_the_prompt_that_its_answer_follows(web: httpx.AsyncClient, house: House) -> None:
    answer = await web.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})
    found = await tokenized(web, messages=CHAT)
    assert answer.json()["usage"]["prompt_tokens"] == found["count"]
    decode = house.service.sessions.targets.named("").decode
    assert decode(found["tokens"]) == "<user>Count.\n<assistant>One, two\n<assistant>"
    closed = await tokenized(web, messages=CHAT, add_generation_prompt=False)
    assert decode(closed["tokens"]) == "<user>Count.\n<assistant>One, two\n"
    going_on = await tokenized(web, messages=CHAT, **CONTINUED)
    assert decode(going_on["tokens"]) == "<user>Count.\n<assistant>One, two"


async def test_an_answer_continues_the_last_message(house: House) -> None:
    """The same text as after this prompt, by OpenAI's client."""
    wanted: dict[str, Any] = {"model": "", "max_tokens": 20, "seed": 5}
    async with AsyncOpenAI(base_url=f"http://{house.service.http_address}/v1", api_key="none") as api:
        chat = await api.chat.completions.create(**wanted, messages=CHAT, extra_body=CONTINUED)
        text = await api.completions.create(**wanted, prompt="<user>Count.\n<assistant>One, two")
        assert chat.choices[0].message.content == text.choices[0].text
        with pytest.raises(openai.BadRequestError, match="add_generation_prompt: false"):
            await api.chat.completions.create(**wanted, messages=CHAT, extra_body={"continue_final_message": True})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "gpt-4"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * (4 * 1024 * 1024 + 1)}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, 400, "body"),
        ("/detokenize", {"tokens": [1, 257]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1] * (1024 * 1024 + 2)}, 400, "body"),
    ],
)
async def test_bad_conversions_are_refused_by_name(
    web: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    reply = await web.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert len(reply.text) < 2_000
