"""One request through real processes: one trace, and logs of every service that name it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from uuid import uuid4

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.speculation import TokenKind
from tests.cluster import SLOW, Cluster, Output, Process, ask, client, follow, until_async, verifier_load
from tests.conftest import Models

pytestmark = pytest.mark.timeout(120)

PROMPT = "A trace is a thread through the maze. "
PARENT = "00f067aa0ba902b7"  # the caller's span
LENGTH = 60
JOIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as the collector got it."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return f"{self.service.removeprefix('outrider-')} {self.span.name}"

    @property
    def attributes(self) -> dict[str, Any]:
        return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in self.span.attributes}

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]


class Collector(ThreadingHTTPServer):
    """As much of an OpenTelemetry collector as is needed to read what it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._lock = threading.Lock()
        self._spans: list[Seen] = []

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for part in request.resource_spans:
                service = next(
                    each.value.string_value for each in part.resource.attributes if each.key == "service.name"
                )
                self._spans += [Seen(service, span) for scope in part.scope_spans for span in scope.spans]

    def of_request(self, request_id: str) -> list[Seen]:
        """Every span of the traces that this request has a part in."""
        with self._lock:
            traces = {s.span.trace_id for s in self._spans if s.attributes.get("outrider.request_id") == request_id}
            return [seen for seen in self._spans if seen.span.trace_id in traces]

    async def whole(self, request_id: str) -> dict[str, list[Seen]]:
        """By service and name; once the coordinator's own span is there and no child misses its parent."""

        async def complete() -> bool:
            spans = self.of_request(request_id)
            known = {seen.span.span_id for seen in spans}
            ended = any(seen.span.name == "generate" for seen in spans)
            asked = [seen for seen in spans if seen.span.kind == Span.SPAN_KIND_CLIENT]
            answered = {seen.span.parent_span_id for seen in spans}
            return (
                ended and all(seen.span.span_id in answered for seen in asked if seen.span.status.code == 0) and known
            )

        await until_async(complete, 20, f"the trace of {request_id}")
        found: dict[str, list[Seen]] = {}
        for seen in self.of_request(request_id):
            found.setdefault(seen.name, []).append(seen)
        return found


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """pytest shows what matters."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def watched(models: Models, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A fleet that traces, and that logs everything as JSON."""
    flags = ("--otlp-endpoint", collector.url, "--log-json", "--log-level", "debug")
    cluster = Cluster(tmp_path_factory.mktemp("watched"))
    cluster.add_coordinator(*flags)
    for _ in range(2):
        cluster.add_verifier(models.target, *SLOW, *flags)
    cluster.add_drafter("model", models.draft, *flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield cluster.start()
    cluster.stop()


async def answer(cluster: Cluster, request_id: str, trace: str, **options: Any) -> Output:
    request = ask(PROMPT, **({"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "gamma": 3} | options))
    metadata = (("x-request-id", request_id), ("traceparent", f"00-{trace}-{PARENT}-01"))
    async with client(cluster.address) as stub:
        return await follow(stub.Generate(request, metadata=metadata, timeout=60), Output())


async def drafted(cluster: Cluster, name: str) -> tuple[Output, str, str]:
    """Return an answer with accepted guesses, and the ids of its request and trace; a drafter may miss the first."""
    numbers = count()

    async def guessed() -> tuple[Output, str, str] | None:
        request_id, trace = f"{name}-{next(numbers)}", uuid4().hex
        output = await answer(cluster, request_id, trace)
        return (output, request_id, trace) if output.stats.accepted_tokens else None

    found: tuple[Output, str, str] = await until_async(guessed, JOIN_S, "guesses accepted")
    return found


def lines(process: Process) -> list[dict[str, Any]]:
    """All that a process has logged, but for a line that it is writing; raises for a line that is no object."""
    whole = process.log().rpartition("\n")[0]
    said = [line for line in whole.splitlines() if not line.startswith("progress: ")]
    return [json.loads(line) for line in said]


async def test_one_request_is_one_trace_through_all_services(watched: Cluster, collector: Collector) -> None:
    output, request_id, trace = await drafted(watched, "traced")
    spans = await collector.whole(request_id)
    assert set(spans) == {
        *("coordinator generate", "coordinator verify", "coordinator draft"),
        *("verifier verify", "drafter draft"),
    }
    assert {seen.span.trace_id.hex() for group in spans.values() for seen in group} == {trace}
    ((generate,), (to_verifier,), (at_verifier,)) = (
        spans[name] for name in ("coordinator generate", "coordinator verify", "verifier verify")
    )
    assert generate.span.parent_span_id.hex() == PARENT, "the caller's"
    assert to_verifier.span.parent_span_id == generate.span.span_id
    assert at_verifier.span.parent_span_id == to_verifier.span.span_id
    ((to_drafter,), (at_drafter,)) = (spans["coordinator draft"], spans["drafter draft"])
    assert to_drafter.span.parent_span_id == generate.span.span_id
    assert at_drafter.span.parent_span_id == to_drafter.span.span_id
    kinds = [seen.span.kind for seen in (generate, to_verifier, to_drafter, at_verifier, at_drafter)]
    server, client_side = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT
    assert kinds == [server, client_side, client_side, server, server]
    for group in spans.values():
        for seen in group:
            assert seen.span.status.code == Status.STATUS_CODE_UNSET
            assert generate.span.start_time_unix_nano <= seen.span.start_time_unix_nano < seen.span.end_time_unix_nano
    for seen in (generate, at_verifier, at_drafter):
        assert seen.attributes["outrider.session_id"] == output.session_id
        assert seen.attributes["outrider.request_id"] == request_id
        assert seen.events == ["first token"]
    told, stats = generate.attributes, output.stats
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.usage.output_tokens"] == LENGTH
    assert told["gen_ai.usage.input_tokens"] == output.prompt_tokens
    assert [each.string_value for each in told["gen_ai.response.finish_reasons"].values] == ["length"]
    assert told["outrider.steps"] == at_verifier.attributes["outrider.steps"] == stats.steps
    assert told["outrider.acceptance_length"] == pytest.approx(stats.acceptance_length)
    assert told["outrider.mean_gamma"] == pytest.approx(stats.mean_gamma)
    assert at_verifier.attributes["outrider.tokens"] == LENGTH
    assert at_verifier.attributes["outrider.mean_step_ms"] == pytest.approx(stats.mean_step_ms)
    server = to_verifier.attributes
    assert f"{server['server.address']}:{server['server.port']}" in {process.address for process in watched.verifiers}
    assert to_drafter.attributes["outrider.kind"] == "model"


async def test_requests_at_once_without_a_trace_get_one_each(watched: Cluster, collector: Collector) -> None:
    """Also where they share a connection, and have several answers."""
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 4, "ignore_eos": True}
    ids = ["at-once-0", "at-once-1"]
    async with httpx.AsyncClient(base_url=watched.coordinators[0].web, timeout=60) as web:
        calls = (web.post("/v1/completions", json=body, headers={"x-request-id": id_}) for id_ in ids)
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
    found = [await collector.whole(id_) for id_ in ids]
    traces = [{seen.span.trace_id for group in spans.values() for seen in group} for spans in found]
    assert [len(each) for each in traces] == [1, 1]
    assert traces[0] != traces[1]
    assert [len(spans["coordinator generate"]) for spans in found] == [2, 2]


async def test_every_line_is_an_object_and_names_the_request(watched: Cluster) -> None:
    output, request_id, _ = await drafted(watched, "logged")
    ids = {"request_id": request_id, "session_id": output.session_id}

    async def ended() -> bool:
        done = ("request ended", "session ended")
        told = [line for process in watched.processes for line in lines(process) if ids.items() <= line.items()]
        return {line["service"] for line in told if line["event"] in done} == {"coordinator", "verifier", "drafter"}

    await until_async(ended, 20, "every service said that the session ended")
    for process in watched.processes:
        for line in lines(process):
            assert {"timestamp", "level", "event", "service"} <= line.keys(), line
            assert process.name.startswith(line["service"])
            assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None
            assert line["level"] in ("debug", "info", "warning", "error", "critical")
            if output.session_id in json.dumps(line):
                assert ids.items() <= line.items(), line
    (told,) = [
        line
        for line in lines(watched.coordinators[0])
        if line["event"] == "request ended" and ids.items() <= line.items()
    ]
    assert (told["reason"], told["output_tokens"]) == ("length", LENGTH)


async def test_a_refused_request_is_named_in_the_log(watched: Cluster) -> None:
    with pytest.raises(InvalidRequest):
        await answer(watched, "refused", uuid4().hex, temperature=-1.0)

    async def told() -> bool:
        return any(
            (line["event"], line.get("request_id"), line.get("code"))
            == ("request refused", "refused", "invalid_request")
            for line in lines(watched.coordinators[0])
        )

    await until_async(told, 10, "the refusal is in the log")


async def test_a_lost_drafter_and_a_lost_verifier_are_events_of_the_trace(
    watched: Cluster, collector: Collector
) -> None:
    """Last in this module: it kills them."""
    killed_at = 0  # the drafter, once it has guessed

    def kill_in_turn(output: Output) -> None:
        nonlocal killed_at
        if not killed_at and TokenKind.ACCEPTED in output.kinds:
            killed_at = len(output.token_ids)
            watched.drafters[0].kill()
        if killed_at and len(output.token_ids) >= killed_at + 60 and all(each.alive for each in watched.verifiers):
            next(process for process in watched.verifiers if verifier_load(process.address).sessions).kill()

    request = ask(PROMPT, temperature=0.0, max_tokens=480, ignore_eos=True, gamma=3)
    metadata = (("x-request-id", "bumpy"),)
    async with client(watched.address) as stub:
        output = await follow(stub.Generate(request, metadata=metadata, timeout=90), Output(), kill_in_turn)
    assert (output.stats.drafter_losses, output.stats.failovers) == (1, 1)

    spans = await collector.whole("bumpy")
    (generate,) = spans["coordinator generate"]
    assert generate.events == ["first token", "drafter lost", "verifier lost"]
    assert (generate.attributes["outrider.failovers"], generate.attributes["outrider.drafter_losses"]) == (1, 1)
    assert generate.span.status.code == Status.STATUS_CODE_UNSET, "it was answered all the same"
    codes = [seen.span.status.code for seen in spans["coordinator verify"]]
    assert sorted(codes) == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]
    assert {seen.span.status.code for seen in spans["coordinator draft"]} == {Status.STATUS_CODE_ERROR}
    assert {seen.attributes["error.type"] for seen in spans["coordinator draft"]} == {"peer_lost"}
