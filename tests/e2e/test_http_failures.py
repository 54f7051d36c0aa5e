"""Whoever dies in the middle, an answer over HTTP is the undisturbed one, or ends in words; who is refused is told when
to come again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.cluster import SLOWER, Cluster, Process, server_info, until, until_async, verifier_load
from tests.conftest import Models

pytestmark = pytest.mark.timeout(180)

PATH = "/v1/completions"
TOKENS = 240
MIDDLE = 20  # tokens that an answer has when disaster strikes, at least: a drafter has joined by then
BODY = {
    "prompt": "Once upon a time, once upon a time, once upon a ",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "seed": 11,
    "temperature": 0.8,
    "speculation": {"gamma": 1, "drafter": "model", "show": True},  # 240 tokens take 1.5 s at least, see SLOWER
}
ENDLESS = BODY | {"max_tokens": 600}


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One coordinator is small and one is slow to leave; a drafter of each kind. Tests bring back what they end."""
    fleet = Cluster(tmp_path_factory.mktemp("fleet"))
    fleet.add_coordinator()
    fleet.add_coordinator("--max-sessions", "2")
    fleet.add_coordinator("--drain-s", "20")
    for _ in range(2):
        fleet.add_verifier(models.target, *SLOWER)
    fleet.add_drafter("model", models.draft)
    fleet.add_drafter("ngram")
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture
def whole(fleet: Cluster) -> Iterator[Cluster]:
    """The fleet with everybody alive, whatever the test before left."""
    fleet.revive()
    return fleet


@pytest.fixture
def narrow(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator, and a verifier with one seat and no waiting room."""
    narrow = Cluster(tmp_path_factory.mktemp("narrow"))
    narrow.add_coordinator("--worker-wait-s", "0.5")
    narrow.add_verifier(models.target, *SLOWER, "--max-sessions", "1", "--max-waiting", "0")
    narrow.start()
    yield narrow
    narrow.stop()


@asynccontextmanager
async def speaking(coordinator: Process) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=coordinator.web, timeout=60) as web:
        yield web


@dataclass(slots=True)
class Heard:
    """All that a streamed answer has said."""

    text: str = ""
    tokens: int = 0
    accepted: int = 0  # of these, guesses of a drafter
    reason: str | None = None
    error: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    done: bool = False


async def listen(
    web: httpx.AsyncClient, body: dict[str, Any], in_the_middle: Callable[[], None] = lambda: None
) -> Heard:
    heard = Heard()
    struck = False
    async with web.stream("POST", PATH, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            assert not heard.done or not line, "nothing follows the end"
            if line == "data: [DONE]":
                heard.done = True
            elif line.startswith("data: "):
                _take(heard, json.loads(line.removeprefix("data: ")))
            if not struck and heard.tokens >= MIDDLE and heard.accepted:
                struck = True
                assert heard.tokens < TOKENS
                in_the_middle()
    return heard


def _take(heard: Heard, event: dict[str, Any]) -> None:
    if "error" in event:
        heard.error = event["error"]
        return
    assert not heard.error, "an error is the last word"
    heard.metrics = event.get("metrics", heard.metrics)
    (choice,) = event["choices"]
    heard.text += choice["text"]
    kinds = choice["speculation"]["kinds"]
    heard.tokens, heard.accepted = heard.tokens + len(kinds), heard.accepted + kinds.count("accepted")
    heard.reason = choice["finish_reason"] or heard.reason


def with_a_session(verifiers: list[Process]) -> Process:
    return until(
        lambda: next((each for each in verifiers if verifier_load(each.address).sessions), None), 10, "a busy verifier"
    )


# --- somebody dies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victim",
    [pytest.param("verifier", marks=pytest.mark.prove), pytest.param("drafters", marks=pytest.mark.prove), "both"],
)
async def test_an_answer_outlives_its_workers(whole: Cluster, victim: str) -> None:
    def disaster() -> None:
        if victim != "drafters":
            with_a_session(whole.verifiers).kill()
        if victim != "verifier":
            for drafter in whole.drafters:
                drafter.kill()

    async with speaking(whole.coordinators[0]) as web:
        wanted = await listen(web, BODY)
        assert (wanted.tokens, wanted.reason, wanted.error) == (TOKENS, "length", {})
        heard = await listen(web, BODY, disaster)
    assert heard.text == wanted.text
    assert (heard.tokens, heard.reason, heard.error, heard.done) == (TOKENS, "length", {}, True)
    ours = heard.metrics["outrider"]
    assert (ours["failovers"] > 0) == (victim != "drafters")
    if victim == "drafters":  # with both, the verifier's end may detach the drafters before theirs is noticed
        assert ours["drafter_losses"] > 0


async def test_a_whole_answer_outlives_its_verifier(whole: Cluster) -> None:
    async with speaking(whole.coordinators[0]) as web:
        wanted = (await web.post(PATH, json=BODY)).json()
        asking = asyncio.create_task(web.post(PATH, json=BODY))
        victim = await asyncio.to_thread(with_a_session, whole.verifiers)
        victim.kill()
        found = (await asking).json()
    assert found["choices"] == wanted["choices"]


async def test_a_coordinator_that_leaves_says_so(whole: Cluster) -> None:
    leaving = whole.coordinators[1]
    async with speaking(leaving) as web:
        heard = await listen(web, ENDLESS, leaving.terminate)
    assert heard.error["type"] == "server_error"
    assert heard.error["code"] == "unavailable"
    assert heard.done
    assert heard.reason is None
    assert await asyncio.to_thread(leaving.wait, 10) == 0
    async with speaking(whole.coordinators[0]) as web:
        again = await listen(web, ENDLESS)
    assert again.text.startswith(heard.text), "asked again elsewhere, it is the same text"


async def test_a_coordinator_that_drains_is_not_ready(whole: Cluster) -> None:
    """Between SIGTERM and its end: balancers are to look elsewhere, and so are clients."""
    leaving = whole.coordinators[2]
    ready: set[int] = set()
    asked: set[int] = set()
    async with speaking(leaving) as web, speaking(leaving) as other:
        listening = asyncio.create_task(listen(web, ENDLESS, leaving.terminate))
        while not listening.done() and 503 not in ready & asked:
            with contextlib.suppress(httpx.TransportError):
                ready.add((await other.get("/ready")).status_code)
                asked.add((await other.post(PATH, json=BODY | {"max_tokens": 1})).status_code)
        await listening
    assert 503 in ready
    assert 503 in asked


async def test_a_client_that_leaves_frees_all(whole: Cluster) -> None:
    async with speaking(whole.coordinators[0]) as web:
        leaving = asyncio.create_task(listen(web, ENDLESS))
        await asyncio.to_thread(with_a_session, whole.verifiers)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await until_async(_idle(whole), 2, "nobody working on it")


def _idle(fleet: Cluster) -> Callable[[], Any]:
    async def idle() -> bool:
        loads = [await asyncio.to_thread(verifier_load, each.address) for each in fleet.verifiers]
        return not any(load.sessions for load in loads) and server_info(fleet.address).sessions == 0

    return idle


# --- nobody has room -------------------------------------------------------------------------------------------------


async def test_a_full_coordinator_says_when_to_come_again(whole: Cluster) -> None:
    small = whole.coordinators[1]
    async with speaking(small) as web:
        going = [asyncio.create_task(listen(web, ENDLESS)) for _ in range(2)]
        await until_async(
            lambda: asyncio.to_thread(lambda: server_info(small.address).sessions == 2), 10, "two of them"
        )
        for stream in (True, False):
            refused = await web.post(PATH, json=BODY | {"stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        for one in going:
            one.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        async with AsyncOpenAI(base_url=f"{small.web}/v1", api_key="none") as api:  # comes again by itself
            found = await api.completions.create(model="", prompt="Once", max_tokens=3)
        assert found.choices[0].finish_reason in ("stop", "length")


async def test_a_full_verifier_says_when_to_come_again(narrow: Cluster) -> None:
    (verifier,) = narrow.verifiers
    async with speaking(narrow.coordinators[0]) as web:
        going = asyncio.create_task(listen(web, ENDLESS | {"speculation": {"show": True}}))
        await asyncio.to_thread(with_a_session, narrow.verifiers)
        async with AsyncOpenAI(base_url=f"{narrow.coordinators[0].web}/v1", api_key="none", max_retries=0) as api:
            with pytest.raises(openai.RateLimitError) as caught:
                await api.completions.create(model="", prompt="Once", max_tokens=3)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await until_async(lambda: asyncio.to_thread(lambda: not verifier_load(verifier.address).sessions), 5, "room")

        async def answered() -> bool:
            return (await web.post(PATH, json=BODY | {"max_tokens": 3})).status_code == 200

        await until_async(answered, 10, "an answer again")


async def test_a_seat_that_becomes_free_is_taken_at_once(narrow: Cluster) -> None:
    """However many were refused before: who is full is not broken."""
    (verifier,) = narrow.verifiers
    short = BODY | {"max_tokens": 3}
    async with speaking(narrow.coordinators[0]) as web:
        assert (await web.post(PATH, json=short)).status_code == 200
        going = asyncio.create_task(listen(web, ENDLESS))
        await asyncio.to_thread(with_a_session, narrow.verifiers)
        for _ in range(6):
            assert (await web.post(PATH, json=short)).status_code == 429
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await until_async(lambda: asyncio.to_thread(lambda: not verifier_load(verifier.address).sessions), 5, "room")
        assert (await web.post(PATH, json=short)).status_code == 200


async def test_without_a_verifier_there_is_no_hurry_but_an_answer(narrow: Cluster) -> None:
    (verifier,) = narrow.verifiers
    async with speaking(narrow.coordinators[0]) as web:
        assert (await web.get("/ready")).status_code == 200
        verifier.kill()

        async def unready() -> bool:
            return (await web.get("/ready")).status_code == 503

        await until_async(unready, 10, "not ready")
        for reply in (await web.get("/ready"), await web.post(PATH, json=BODY)):
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["type"] == "server_error"
        assert (await web.get("/health")).status_code == 200
        await asyncio.to_thread(narrow.restart, verifier)
        assert (await web.post(PATH, json=BODY | {"max_tokens": 3})).status_code == 200


async def test_before_there_ever_was_a_verifier(tmp_path_factory: pytest.TempPathFactory) -> None:
    alone = Cluster(tmp_path_factory.mktemp("alone"))
    alone.add_coordinator()
    alone.redis.start()
    try:
        (coordinator,) = alone.coordinators
        await asyncio.to_thread(lambda: coordinator.start().wait_ready())
        async with speaking(coordinator) as web:
            for path in ("/ready", "/v1/models", "/v1/models/target"):
                reply = await web.get(path)
                assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
            assert (await web.post(PATH, json=BODY)).status_code == 503
            assert (await web.get("/fleet")).json()["workers"] == []
    finally:
        alone.stop()
