"""Alerts fire for what they name: a verifier without capacity is no failure, wherever requests wait for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio

from coordinator.api.preprocess import admission
from coordinator.api.service import CoordinatorService
from coordinator.control.throughput_model import Mode
from coordinator.persistence.session_record import SessionRecord, SessionRequest
from coordinator.sessions.stats import RequestStats
from coordinator.workers.choosers import NoVerifier
from coordinator.workers.target import Target
from coordinator.workers.targets.known_targets import KnownTargets, ModelNames
from outrider.base.aio import until as soon
from outrider.engine.loading.loader import LoadedModel
from outrider.observability.metrics import CoordinatorMetrics
from outrider.observability.tracing import OFF
from outrider.protocol.errors import OutriderError, Overloaded, Unavailable
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason
from outrider.settings.coordinator import CoordinatorSettings
from tests.cluster import Redis, ask, client, free_port, generate, in_process
from tests.contract.conftest import slowed, verifier_serving
from tests.contract.test_observability import PROMPT, Page, Watched, expressions

_RATE = re.compile(r"sum(?: by \((?P<by>\w+)\))? ?\(rate\((?P<name>\w+)(?P<labels>\{[^}]*\})?\[[$\w]+\]\)\)")
_ABOVE = re.compile(r"(?P<name>outrider_\w+) > (?P<limit>[\d.]+)")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_FEW_TOKENS = 512  # of the verifier's cache


def expression_of(alert: str) -> str:
    return next(expression for place, expression in expressions() if place == f"alert {alert}")


def fires(alert: str, before: Page, after: Page) -> bool:
    """Evaluate an alert of sums of rates, by how much the counters grew."""
    return bool(firing(alert, before, after))


def firing(alert: str, before: Page, after: Page) -> list[str]:
    """Return the models for which an alert fires, an empty name where it does not tell them apart."""
    expression = expression_of(alert)
    by = {selector["by"] for selector in _RATE.finditer(expression)}
    models = {sample.labels.get("model_name", "") for sample in after.samples} if by == {"model_name"} else {""}
    return [model for model in sorted(models) if evaluate(expression, before, after, model)]


def evaluate(expression: str, before: Page, after: Page, model: str = "") -> float:
    """Return an expression's value for a model, or for all; without a request it is nothing that any alert is above."""

    def growth(selector: re.Match[str]) -> str:
        return str(selected(after, selector, model) - selected(before, selector, model))

    try:
        return float(eval(f"({_RATE.sub(growth, expression)})"))
    except ZeroDivisionError:
        return 0.0


def selected(page: Page, selector: re.Match[str], model: str) -> float:
    matchers = [*_MATCHER.findall(selector["labels"] or ""), *([("model_name", "=", model)] if model else ())]
    samples = [sample for sample in page.samples if sample.name == selector["name"]]
    assert samples or not page.samples
    fitting = (s for s in samples if all(matches(s.labels.get(label, ""), *wanted) for label, *wanted in matchers))
    return sum(sample.value for sample in fitting)


def matches(value: str, operator: str, wanted: str) -> bool:
    return (re.fullmatch(wanted if "~" in operator else re.escape(wanted), value) is None) == ("!" in operator)


def exported(metrics: CoordinatorMetrics) -> Page:
    return Page.of(metrics.render()[0])


def ended(metrics: CoordinatorMetrics, model: str, error: OutriderError | None = None, **record: Any) -> None:
    """Let a request end, finished if there is no error."""
    stats = RequestStats(metrics.of(model))
    given = {"finish_reason": FinishReason.NONE if error else FinishReason.STOP} | record
    request = SessionRecord("s", SessionRequest((1, 2), SamplingParams(seed=1)), **given)
    stats.start(request, OFF, model)
    stats.finish(request, error)


def test_a_model_of_which_all_requests_fail_is_told_beside_a_busy_one() -> None:
    """Its verifiers have left; its requests are one in a hundred of all."""
    metrics = CoordinatorMetrics(Mode)
    for model in ("busy", "small", "idle"):
        metrics.of(model)
    before = exported(metrics)
    for _ in range(99):
        ended(metrics, "busy")
    ended(metrics, "small", NoVerifier("no verifier has been available for 30 s"))
    assert firing("OutriderRequestsFail", before, exported(metrics)) == ["small"]


def test_a_model_that_never_registered_is_told() -> None:
    """The default model's verifiers did not come up, another model's did: its requests are refused and none fails."""
    metrics, targets = CoordinatorMetrics(Mode), KnownTargets(ModelNames.read("", "big", ""))
    nothing: Any = None
    targets.add(Target(ModelInfo("small", "f"), nothing, nothing, nothing, "f"), lambda _: [1])
    metrics.of("small")
    before = exported(metrics)
    with pytest.raises(Unavailable), admission(metrics):
        targets.named("")
    after = exported(metrics)
    assert not fires("OutriderRequestsFail", before, after)
    assert fires("OutriderUnavailable", before, after)


def test_a_resumed_request_is_shown_as_one() -> None:
    """The stream that its client lost is shown as abandoned, in a panel of its own."""
    metrics = CoordinatorMetrics(Mode)
    metrics.of("m")
    before = exported(metrics)
    ended(metrics, "m", finish_reason=FinishReason.NONE)
    ended(metrics, "m", epoch=2, tokens=[7])
    panel = next(expression for place, expression in expressions() if place == "panel Requests")
    assert evaluate(panel.replace("$model_name", "m"), before, exported(metrics)) == 1


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
