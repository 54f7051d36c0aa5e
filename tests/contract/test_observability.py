"""What dashboards and alerts ask for is what services export, and it is true."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from coordinator.api.service import CoordinatorService
from coordinator.sessions import streams
from outrider.base.aio import until as soon
from outrider.engine.loading.loader import LoadedModel
from outrider.protocol.errors import InvalidRequest
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import verifier_pb2 as verify
from outrider.v1 import verifier_pb2_grpc as rpc
from tests.cluster import ROOT, Output, Redis, ask, client, failure, free_port, generate, in_process
from tests.conftest import Models
from tests.contract.conftest import after_joining, drafter_serving, verifier_serving
from tests.contract.test_processes import assert_told, run

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "outrider.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PROMETHEUS = ROOT / "deploy" / "prometheus" / "prometheus.yml"
PROMPT = "Two heads are better than one, and two heads are better than none. Two heads are "
LENGTH = 180
ADDED = {"job", "instance"}  # labels that Prometheus adds
OVER_TIME = ("rate", "increase")


@dataclass(frozen=True, slots=True)
class Page:
    """What one service exports."""

    types: dict[str, str] = field(default_factory=dict)  # by the name of the sample
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def of(cls, body: bytes) -> Page:
        page = cls()
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                page.types[sample.name] = family.type
                page.samples.append(sample)
        return page

    def sum(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == f"outrider_{name}" and labels.items() <= s.labels.items()]
        assert found, f"{name} {labels} is not exported"
        return sum(found)

    def labels(self, name: str) -> set[str]:
        return {label for sample in self.samples if sample.name == name for label in sample.labels}


@dataclass(frozen=True, slots=True)
class Watched:
    """A house whose every service can be scraped."""

    address: str
    service: CoordinatorService
    ports: dict[str, int]
    outputs: list[Output]

    def page(self, service: str) -> Page:
        if service == "coordinator":
            body, content_type = self.service.sessions.metrics.render()
        else:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[service]}/metrics", timeout=10) as reply:
                body, content_type = reply.read(), reply.headers["content-type"]
        assert content_type.startswith("text/plain")
        return Page.of(body)

    def pages(self) -> list[Page]:
        return [self.page(service) for service in ("coordinator", *self.ports)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(
    loaded: LoadedModel, models: Models, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Watched]:
    """Has answered some requests and refused one."""
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=100, worker_wait_s=5)
    service = CoordinatorService(settings, redis_server.url)
    ports = {"verifier": free_port(), "drafter": free_port()}
    folder = tmp_path_factory.mktemp("tokenizer")
    async with AsyncExitStack() as stack:
        one_step_each = stack.enter_context(pytest.MonkeyPatch.context())  # verdicts that are read late share none
        one_step_each.setattr(streams, "PLAIN_STEPS", 1)
        address = await stack.enter_async_context(in_process(service, settings))
        await stack.enter_async_context(
            verifier_serving(loaded, folder, coordinators=address, metrics_port=ports["verifier"])
        )
        draft = {"kind": "model", "model": str(models.draft), "device": "cpu"}
        await stack.enter_async_context(drafter_serving(**draft, coordinators=address, metrics_port=ports["drafter"]))
        assert await soon(lambda: service.ready() and len(service.sessions.worker_pool.connections()) == 2, 20)
        async with client(address) as stub:
            options: list[dict[str, Any]] = [{"gamma": 4}, {"gamma": 0}, {"gamma": None, "temperature": 0.0}]
            with after_joining(loaded, service):
                outputs = [
                    await generate(stub, ask(PROMPT, max_tokens=LENGTH, ignore_eos=True, **option))
                    for option in options
                ]
            _, error, _ = await failure(stub.Generate(ask(PROMPT, temperature=-1.0)))
            assert isinstance(error, InvalidRequest)
        yield Watched(address, service, ports, outputs)


async def test_what_a_request_was_is_what_is_counted(watched: Watched) -> None:
    page, stats = watched.page("coordinator"), [output.stats for output in watched.outputs]
    assert page.sum("request_success_total") == len(stats)
    assert page.sum("request_success_total", finished_reason="length") == len(stats)
    assert page.sum("requests_failed_total") == 0
    assert page.sum("requests_refused_total") == page.sum("requests_refused_total", code=InvalidRequest.code) == 1
    assert page.sum("generation_tokens_total") == len(stats) * LENGTH
    assert page.sum("prompt_tokens_total") == sum(output.prompt_tokens for output in watched.outputs)
    assert page.sum("time_to_first_token_seconds_count") == len(stats)
    assert page.sum("e2e_request_latency_seconds_count") == len(stats)
    assert page.sum("request_time_per_output_token_seconds_count") == len(stats)
    assert page.sum("request_generation_tokens_sum") == len(stats) * LENGTH
    assert page.sum("inter_token_latency_seconds_count") == sum(each.steps - 1 for each in stats)
    assert page.sum("num_requests_running") == page.sum("num_requests_waiting") == 0


async def test_speculation_is_counted_as_clients_are_told(watched: Watched) -> None:
    page, stats = watched.page("coordinator"), [output.stats for output in watched.outputs]
    accepted = sum(each.accepted_tokens for each in stats)
    assert accepted > LENGTH / 3, "the draft is a near copy of the target"
    assert page.sum("spec_decode_num_accepted_tokens_total") == accepted
    assert page.sum("spec_decode_num_draft_tokens_total") == sum(each.draft_tokens for each in stats)
    assert page.sum("spec_decode_num_drafts_total") == sum(each.drafts for each in stats)
    for place in range(4):
        name, position = "spec_decode_num_accepted_tokens_per_pos_total", str(place)
        told = sum(each.accepted_per_position[place] for each in stats if len(each.accepted_per_position) > place)
        assert page.sum(name, position=position) == told
    assert page.sum("plan_steps_total") == page.sum("gamma_count") == sum(each.steps for each in stats)
    assert page.sum("plan_steps_total", plan="plain") >= LENGTH, "one of them was plain"
    assert page.sum("gamma_bucket", le="0.0") == page.sum("plan_steps_total", plan="plain")
    assert page.sum("guessed_tokens_total", drafter="model") == sum(
        share.guessed for s in stats for share in s.drafters
    )
    assert page.sum("accepted_guesses_total", drafter="model") == accepted
    assert page.sum("bytes_per_accepted_token_count") == sum(each.accepted_tokens > 0 for each in stats)
    assert page.sum("bytes_per_accepted_token_sum") == pytest.approx(sum(s.bytes_per_accepted_token for s in stats))
    assert (
        page.sum("guess_bytes_total") > sum(each.bytes_per_accepted_token * each.accepted_tokens for each in stats) - 1
    )


async def test_the_fleet_is_shown(watched: Watched) -> None:
    page = watched.page("coordinator")
    for role in ("verifier", "drafter"):
        assert page.sum("workers", role=role, state="usable") == 1
        assert 0 < page.sum("worker_round_trip_seconds", role=role) < 5
        assert page.sum("worker_sessions", role=role) == 0
    assert page.sum("redis_up") == 1


async def test_workers_tell_of_their_steps(watched: Watched) -> None:
    verifier, drafter = watched.page("verifier"), watched.page("drafter")
    steps = sum(output.stats.steps for output in watched.outputs)
    assert verifier.sum("verifier_step_seconds_count") >= steps
    assert verifier.sum("verifier_batch_sessions_sum") == verifier.sum("verifier_batch_sessions_count")
    assert verifier.sum("verifier_step_rows_sum") >= len(watched.outputs) * LENGTH
    assert verifier.sum("verifier_forward_seconds_sum") < verifier.sum("verifier_step_seconds_sum")
    assert verifier.sum("request_queue_time_seconds_count") == len(watched.outputs)
    prompt = watched.outputs[0].prompt_tokens
    assert verifier.sum("prefix_cache_queries_total") == len(watched.outputs) * prompt
    assert 0 < verifier.sum("prefix_cache_hits_total") < len(watched.outputs) * prompt
    assert 0 < verifier.sum("kv_cache_idle_ratio") < 1
    assert drafter.sum("drafter_step_seconds_count", kind="model") > 0
    told = sum(share.guessed for output in watched.outputs for share in output.stats.drafters)
    assert drafter.sum("drafter_guessed_tokens_total") >= told


async def test_a_session_is_shown_while_it_runs_and_counted_when_its_client_goes(watched: Watched) -> None:
    before = watched.page("coordinator").sum("request_success_total", finished_reason="abandoned")
    async with client(watched.address) as stub:
        call = stub.Generate(ask(PROMPT, max_tokens=1900, ignore_eos=True, gamma=0), timeout=60)
        async for reply in call:
            if reply.WhichOneof("message") == "chunk":
                break
        page, verifier = watched.page("coordinator"), watched.page("verifier")
        assert page.sum("num_requests_running") == page.sum("worker_sessions", role="verifier") == 1
        assert verifier.sum("verifier_sessions") == 1
        assert 0 < verifier.sum("kv_cache_usage_ratio") < 1
        call.cancel()

        def abandoned() -> bool:
            page = watched.page("coordinator")
            return page.sum("request_success_total", finished_reason="abandoned") == before + 1

        assert await soon(abandoned, 10)
        assert watched.page("coordinator").sum("num_requests_running") == 0
        assert await soon(lambda: watched.page("verifier").sum("kv_cache_usage_ratio") == 0, 10)


async def test_workers_count_what_they_refuse(watched: Watched) -> None:
    """A stranger at the verifier's door."""
    worker = next(w for w in watched.service.sessions.worker_pool.infos() if w.kind == "target")
    async with grpc.aio.insecure_channel(worker.address) as channel:
        call = rpc.VerifierStub(channel).Verify(timeout=10)
        await call.write(verify.VerifyRequest(open=verify.OpenVerify(session_id="stranger")))
        await failure(call)
    assert watched.page("verifier").sum("verifier_sessions_refused_total", code=InvalidRequest.code) == 1
    assert watched.page("verifier").sum("verifier_sessions_refused_total") == 1
    assert watched.page("drafter").sum("drafter_sessions_refused_total") == 0


async def test_the_client_learns_by_what_id_its_request_is_known(watched: Watched) -> None:
    async with client(watched.address) as stub:
        given = stub.Generate(ask(PROMPT, max_tokens=1), metadata=(("x-request-id", "mine-1"),), timeout=10)
        assert dict(await given.initial_metadata())["x-request-id"] == "mine-1"
        made = stub.Generate(ask(PROMPT, max_tokens=1), timeout=10)
        assert len(dict(await made.initial_metadata())["x-request-id"]) == 32
        again = stub.Resume(pb.ResumeRequest(session_id="nobody"), metadata=(("x-request-id", "mine-2"),), timeout=10)
        assert dict(await again.trailing_metadata())["x-request-id"] == "mine-2"
        assert not list(await again.initial_metadata()), "a refusal with it would end a client's retries"
        for call in (given, made):
            async for _ in call:
                pass
        await failure(again)


# --- dashboards and alerts -------------------------------------------------------------------------------------------

_SELECTOR = re.compile(
    r"(?:\b(?P<over>\w+)\()?\b(?P<name>(?:outrider|process)_\w+|up)\b(?P<labels>\{[^}]*\})?(?P<range>\[[^\]]+\])?"
)
_BY = re.compile(r"\bby \(([^)]*)\) \((?:\w+\()?(\w+)")


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and what Prometheus is asked there."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def test_there_are_panels_and_alerts() -> None:
    places = {place for place, _ in expressions()}
    assert len([place for place in places if place.startswith("panel")]) > 30
    assert len([place for place in places if place.startswith("alert")]) > 5


async def test_everything_that_is_asked_for_is_exported(watched: Watched) -> None:
    pages = watched.pages()
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    asked = [*expressions(), *(("variable", v["query"]["query"]) for v in variables if v["type"] == "query")]
    for place, expression in asked:
        selectors = list(_SELECTOR.finditer(expression))
        assert selectors, f"{place} asks for nothing: {expression}"
        for selector in selectors:
            name = selector["name"]
            if name == "up":
                continue  # Prometheus's own
            homes = [page for page in pages if name in page.types]
            assert homes, f"{place}: nobody exports {name}"
            wanted = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector["labels"] or ""))
            for by, of in _BY.findall(expression):
                wanted |= set(by.split(", ")) if of == name else set()
            known = ADDED.union(*(page.labels(name) for page in homes))
            assert wanted <= known, f"{place}: {name} has no label {wanted - known}"


async def test_rates_are_taken_of_what_grows_and_quantiles_of_buckets(watched: Watched) -> None:
    types = {name: kind for page in watched.pages() for name, kind in page.types.items()}
    for place, expression in expressions():
        for selector in _SELECTOR.finditer(expression):
            name, over = selector["name"], selector["over"]
            grows = types.get(name, "gauge") in ("counter", "histogram")
            assert (over in OVER_TIME) == grows, f"{place}: {over or 'no rate'} of {name}"
            assert (selector["range"] is not None) == grows, f"{place}: {name}"
        for part in expression.split("histogram_quantile(")[1:]:
            assert re.match(r"0\.\d+, sum by \(le\b", part), f"{place}: the buckets' bounds are lost: {expression}"
            first = _SELECTOR.search(part)
            assert first is not None
            assert first["name"].endswith("_bucket"), place
            assert types[first["name"]] == "histogram", place


async def test_alerts_name_values_that_exist(watched: Watched) -> None:
    """A matcher for a value that never comes makes an alert that never comes."""
    pages = watched.pages()
    for place, expression in expressions():
        for selector in _SELECTOR.finditer(expression):
            for label, given in re.findall(r'(\w+)="([^"]*)"', selector["labels"] or ""):
                samples = [s for page in pages for s in page.samples if s.name == selector["name"]]
                values = {sample.labels[label] for sample in samples}
                if (selector["name"], label) == ("up", "job"):  # Prometheus's own, of what it scrapes
                    values = set(re.findall(r"job_name: (\S+)", PROMETHEUS.read_text()))
                assert given in values, f"{place}: no {label} is {given}"


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_told(run("drafter", "--kind", "ngram", "--metrics-port", port), 1, port, "--metrics-port")


async def test_tokens_after_a_stop_string_are_not_counted(watched: Watched) -> None:
    """It comes last: the other tests compare all that was counted with all that was asked."""
    output = watched.outputs[2]
    stop = output.text[40:44]
    options = {"gamma": 8, "temperature": 0.0, "ignore_eos": True, "max_tokens": LENGTH, "stop": [stop]}
    before = watched.page("coordinator").sum("generation_tokens_total")
    async with client(watched.address) as stub:
        cut = await generate(stub, ask(PROMPT, **options))
    assert cut.stop == stop
    counted = watched.page("coordinator").sum("generation_tokens_total") - before
    assert counted == len(cut.token_ids) < LENGTH
