"""Tracing where it is off, cannot be, or has a collector that does not answer."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextvars import copy_context

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode

from outrider.observability.request_context import bind_context
from outrider.observability.tracing import FLUSH_S, NO_SPAN, OFF, _Exported, make_tracing
from outrider.protocol.errors import PeerLost, StartupError

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_without_an_endpoint_nothing_is_traced_and_nothing_loaded() -> None:
    assert make_tracing("", "coordinator") is OFF
    span = OFF.start("generate", PARENT, {})
    assert span is NO_SPAN
    assert span.child("verify", {}) is NO_SPAN
    assert span.carrier() == {}
    imports = "outrider.observability.span_events, outrider.observability.request_context"
    script = f"import sys, {imports}; assert 'opentelemetry' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://", "4318", "http://[x"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(StartupError, match=r"otlp_endpoint is .*http://collector:4318"):
        make_tracing(endpoint, "coordinator")


def test_without_opentelemetry_an_endpoint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match=r"pip install '\.\[tracing\]' in a checkout"):
        make_tracing("http://127.0.0.1:4318", "coordinator")


def test_a_collector_that_does_not_answer_does_not_keep_a_service_from_leaving() -> None:
    """In a process of its own: what sends the spans tries again in a thread that outlives the service."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        script = f"""
import asyncio, time
from outrider.observability.tracing import make_tracing
async def leave():
    tracing = make_tracing("http://127.0.0.1:{silent.getsockname()[1]}", "coordinator")
    for _ in range(2000):
        tracing.start("generate", {{}}, {{}}).end()
    began = time.monotonic()
    await tracing.close()
    print(time.monotonic() - began)
asyncio.run(leave())
"""
        took = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert float(took.stdout.split()[-1]) < FLUSH_S + 2


async def test_spans_carry_the_trace_that_they_belong_to() -> None:
    tracing = make_tracing("http://127.0.0.1:1/", "coordinator")
    span = tracing.start("generate", PARENT, {"outrider.session_id": "s"})
    child = span.child("verify", {})
    trace, parent = PARENT["traceparent"].split("-")[1:3]
    version, own_trace, own_id, flags = child.carrier()["traceparent"].split("-")
    assert (version, own_trace, flags) == ("00", trace, "01")
    assert own_id not in (parent, span.carrier()["traceparent"].split("-")[2])
    nonsense = tracing.start("generate", {"traceparent": "nonsense"}, {})
    assert nonsense.carrier()["traceparent"].split("-")[1] != trace, "a trace of its own"
    await tracing.close()
    await tracing.close()


async def test_the_answers_of_one_request_share_a_trace() -> None:
    """A client without a trace of its own asks for several choices, as load generators do with `n`."""
    tracing = make_tracing("http://127.0.0.1:1/", "coordinator")

    def call() -> set[str]:
        carrier = bind_context((), first=True).carrier
        spans = [tracing.start("generate", carrier, {}) for _ in range(2)]
        return {span.carrier()["traceparent"].split("-")[1] for span in spans}

    (one,), (other,) = (copy_context().run(call) for _ in range(2))
    assert one != other
    await tracing.close()


async def test_a_span_that_failed_has_the_kind_of_its_error() -> None:
    ended: list[ReadableSpan] = []

    class Kept(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

    tracing = make_tracing("http://127.0.0.1:1/", "coordinator")
    assert isinstance(tracing, _Exported)
    tracing._provider.add_span_processor(Kept())
    for error in (PeerLost("verifier lost"), asyncio.CancelledError(), None):
        tracing.start("verify", {}, {}).end(error)
    told = [(span.status.status_code, span.status.description, dict(span.attributes or {})) for span in ended]
    answered: tuple[StatusCode, str | None, dict[str, str]] = (StatusCode.UNSET, None, {})
    assert told == [(StatusCode.ERROR, "verifier lost", {"error.type": "peer_lost"}), answered, answered]
    await tracing.close()
