"""Alerts fire for what they name: a verifier without capacity is no failure, wherever requests wait for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx2 as httpx
import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from outrider.base.aio import until as soon
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.errors import Overloaded
from outrider.settings.coordinator import CoordinatorSettings
from tests.cluster import Redis, ask, client, free_port, generate, in_process
from tests.contract.conftest import slowed, verifier_serving
from tests.contract.test_observability import PROMPT, Page, Watched, expressions

_RATE = re.compile(r"sum\(rate\((?P<name>\w+)(?P<labels>\{[^}]*\})?\[\w+\]\)\)")
_ABOVE = re.compile(r"(?P<name>outrider_\w+) > (?P<limit>[\d.]+)")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_FEW_TOKENS = 512  # of the verifier's cache


def expression_of(alert: str) -> str:
    return next(expression for place, expression in expressions() if place == f"alert {alert}")


def fires(alert: str, before: Page, after: Page) -> bool:
    """Evaluate an alert of sums of rates, by how much the counters grew."""

    def growth(selector: re.Match[str]) -> str:
        return str(selected(after, selector) - selected(before, selector))

    return bool(eval(f"({_RATE.sub(growth, expression_of(alert))})"))


def selected(page: Page, selector: re.Match[str]) -> float:
    matchers = _MATCHER.findall(selector["labels"] or "")
    samples = [sample for sample in page.samples if sample.name == selector["name"]]
    assert samples
    fitting = (s for s in samples if all(matches(s.labels[label], *wanted) for label, *wanted in matchers))
    return sum(sample.value for sample in fitting)


def matches(value: str, operator: str, wanted: str) -> bool:
    return (re.fullmatch(wanted if "~" in operator else re.escape(wanted), value) is None) == ("!" in operator)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(
    loaded: LoadedModel, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Watched]:
    """A verifier that has a place for one session and lets none wait."""
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100)
    service, port = CoordinatorService(settings, redis_server.url), free_port()
    limits = {"max_sessions": 1, "max_waiting": 0, "kv_tokens": _FEW_TOKENS, "metrics_port": port}
    async with (
        in_process(service, settings) as address,
        verifier_serving(loaded, tmp_path_factory.mktemp("tokenizer"), coordinators=address, **limits),
    ):
        assert await soon(service.ready, 20)
        yield Watched(address, service, {"verifier": port}, [])


async def test_an_overload_is_no_failure(small: Watched, loaded: LoadedModel) -> None:
    """Its clients were told when to come again: more capacity helps, not a look at the log."""
    before = small.page("coordinator")
    async with client(small.address) as stub:
        with slowed(loaded, 0.02):
            calls = [generate(stub, ask(PROMPT, max_tokens=100, ignore_eos=True)) for _ in range(4)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(end, Overloaded) for end in ends) == 3
    after = small.page("coordinator")
    assert fires("OutriderOverloaded", before, after)
    assert not fires("OutriderRequestsFail", before, after)


async def test_a_deadline_in_the_queue_is_an_overload_too(small: Watched, loaded: LoadedModel) -> None:
    before = small.page("coordinator")
    async with client(small.address) as stub, httpx.AsyncClient(base_url=f"http://{small.service.http_address}") as web:
        with slowed(loaded, 0.02):
            first = asyncio.ensure_future(generate(stub, ask(PROMPT, max_tokens=100, ignore_eos=True)))
            assert await soon(lambda: any(not session.stats.waiting for session in small.service.sessions.live), 20)
            late = {"json": {"prompt": PROMPT, "max_tokens": 4, "priority": 1}, "headers": {"X-Request-Timeout": "0.3"}}
            reply = await web.post("/v1/completions", **late)
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "expired")
            await first
    after = small.page("coordinator")
    assert fires("OutriderOverloaded", before, after)
    assert not fires("OutriderRequestsFail", before, after)


async def test_a_full_cache_is_told_wherever_requests_wait_for_it(small: Watched, loaded: LoadedModel) -> None:
    """With several keys or classes they wait at the coordinator, so that no verifier knows of them."""
    async with client(small.address) as stub:
        with slowed(loaded, 0.02):
            request = ask([1], max_tokens=_FEW_TOKENS - 33, ignore_eos=True)
            request.priority = 1
            calls = [stub.Generate(request, timeout=60) for _ in range(2)]

            def alert() -> bool:
                pages, found = small.pages(), list(_ABOVE.finditer(expression_of("OutriderCacheFull")))
                assert len(found) == 2
                samples = [sample for page in pages for sample in page.samples]
                above = [
                    {
                        s.labels["model_name"]
                        for s in samples
                        if s.name == each["name"] and s.value > float(each["limit"])
                    }
                    for each in found
                ]
                return bool(set.intersection(*above))

            assert await soon(alert, 5)
            for call in calls:
                call.cancel()
