"""Benchmark tools of others read our acceptance over the wire, and it is the one that we tell ourselves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from coordinator.control.throughput_model import Mode
from outrider.settings.coordinator import CoordinatorSettings
from tests.bench_serve import Counts, read
from tests.cluster import Redis, in_process
from tests.contract.conftest import House, after_joining

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "Two and two is four, and two and two is four, and two and two is"
CHAT = [{"role": "user", "content": PROMPT}]
LENGTH = 60
# A chain, a tree, none at all, and what is found to pay.
WISHES: list[dict[str, Any]] = [{"gamma": 4}, {"gamma": 3, "branches": 3}, {"gamma": 0}, {}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def web(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """Shows no key, as these tools show none to /metrics."""
    async with httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=60) as made:
        yield made


async def scraped(web: httpx.AsyncClient) -> Counts:
    reply = await web.get("/metrics")
    assert reply.status_code == 200
    found = read(reply.text)
    assert found is not None, "a benchmark that reads this page shows no acceptance"
    return found


async def whole(web: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await web.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["metrics"]["speculative_decoding"])


async def streamed(web: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """From the last chunk, which has the usage and no choices."""
    async with web.stream("POST", route, json=body | USAGE) as reply:
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    *others, last = map(json.loads, lines)
    assert not any("metrics" in chunk for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == LENGTH
    return dict(last["metrics"]["speculative_decoding"])


async def test_counters_are_there_before_the_first_request(house: House, web: httpx.AsyncClient) -> None:
    """`vllm bench serve` reads them before it begins, and compares with nothing if there are none."""
    assert not house.service.sessions.live
    assert await scraped(web) == Counts(accepted_at={0: 0})


async def test_what_lies_between_two_pages_is_what_requests_were_told(house: House, web: httpx.AsyncClient) -> None:
    before = await scraped(web)
    common = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
    found = []
    with after_joining(house.loaded, house.service):
        for wish in WISHES:
            body = common | {"speculation": wish}
            for ask in (whole, streamed):
                found.append(await ask(web, "/v1/completions", body | {"prompt": PROMPT}))
                found.append(await ask(web, "/v1/chat/completions", body | {"messages": CHAT}))
    between = (await scraped(web)).since(before)
    assert between.drafts == sum(each["num_spec_steps"] for each in found) > 0
    assert between.draft_tokens == sum(each["num_draft_tokens"] for each in found)
    assert between.accepted == sum(each["num_accepted_draft_tokens"] for each in found) > LENGTH
    longest = max(len(each["acceptance_histogram"]) for each in found)
    reached = [sum(sum(each["acceptance_histogram"][place:]) for each in found) for place in range(1, longest)]
    assert between.accepted_at == {place: count for place, count in enumerate(reached) if count}
    plain = found[4 * WISHES.index({"gamma": 0}) :][:4]
    assert [each["acceptance_histogram"] for each in plain] == [[0]] * 4
    # The whole run: as our own metrics have it.
    ours = house.service.sessions.metrics.registry
    after, target = await scraped(web), {"model_name": house.service.sessions.targets.named("").info.name}
    for name, count in (
        ("drafts", after.drafts),
        ("draft_tokens", after.draft_tokens),
        ("accepted_tokens", after.accepted),
    ):
        assert ours.get_sample_value(f"outrider_spec_decode_num_{name}_total", target) == count
    assert ours.get_sample_value("outrider_plan_steps_total", target | {"plan": Mode.TREE_TURNS}), "no tree was checked"
    by_step = sum(each["mean_acceptance_length"] * each["num_spec_steps"] for each in found)
    assert between.acceptance_length == pytest.approx(by_step / between.drafts)
    by_guess = sum(each["draft_acceptance_rate"] * each["num_draft_tokens"] for each in found)
    assert between.acceptance_rate == pytest.approx(by_guess / between.draft_tokens)


async def test_a_benchmark_that_is_given_no_model_finds_it_and_its_tokenizer(
    house: House, web: httpx.AsyncClient
) -> None:
    card = (await web.get("/v1/models")).json()["data"][0]
    assert (await web.post("/v1/completions", json={"model": card["id"], "prompt": PROMPT})).status_code == 200
    assert card["root"] == house.service.sessions.targets.named("").info.name


@pytest.mark.parametrize("open_metrics", [False, True])
async def test_metrics_are_open_to_tools_without_a_key_where_that_is_meant(
    open_metrics: bool, redis_server: Redis
) -> None:
    settings = CoordinatorSettings(http_port=0, api_keys="a-client", fleet_key="the-fleet", open_metrics=open_metrics)
    service = CoordinatorService(settings, redis_server.url)
    async with (
        in_process(service, settings),
        httpx.AsyncClient(base_url=f"http://{service.http_address}", timeout=10) as stranger,
    ):
        status = {
            route: (await stranger.get(route)).status_code
            for route in ("/metrics", "/fleet", "/v1/models", "/docs", "/openapi.json")
        }
        key = {"Authorization": "Bearer a-client"}
        assert (await stranger.get("/metrics", headers=key)).status_code == 200
    opened = dict.fromkeys(("/docs", "/openapi.json"), 200)  # a browser follows a link without a key
    assert status == opened | {"/metrics": 200 if open_metrics else 401, "/fleet": 401, "/v1/models": 401}
