"""Traces: one per request, across the services, sent to a collector over OTLP/HTTP.

Only this module imports OpenTelemetry, and only if an endpoint is set; without one, spans do nothing. OpenTelemetry
reads further settings (sampling, headers, batching) from its own OTEL_ variables.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from outrider.base.aio import until
from outrider.protocol.errors import OutriderError, StartupError

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

log = structlog.get_logger(__name__)

FLUSH_S = 3.0  # for the last spans, when a service stops
CARRIED = ("traceparent", "tracestate")  # headers sent from service to service
TRACE_ID: ContextVar[int] = ContextVar("trace_id")  # of a call without a trace: its answers, as of `n`, share one
_PATH = "/v1/traces"

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


class Span:
    """One service's part of a request. The base class records nothing."""

    def child(self, name: str, attributes: Attributes) -> Span:
        """Return the span of a call to another service."""
        return self

    def carrier(self) -> dict[str, str]:
        """Return the headers for the next service."""
        return {}

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes | None = None) -> None: ...

    def end(self, error: BaseException | None = None) -> None:
        """End the span, as failed by an error of Outrider's: others are cancellations."""


NO_SPAN = Span()


class Tracing:
    """Factory of one service's spans. The base class records nothing."""

    def start(self, name: str, carrier: Mapping[str, str], attributes: Attributes) -> Span:
        """Return the span of a request that arrived with `carrier`."""
        return NO_SPAN

    async def close(self) -> None:
        """Send the remaining spans."""


OFF = Tracing()


def make_tracing(endpoint: str, service: str) -> Tracing:
    """Return the tracing of `service` to the collector at `endpoint`; empty: none."""
    return _Exported(endpoint, service) if endpoint else OFF


class _Recorded(Span):
    def __init__(self, span: OtelSpan, tracer: Tracer) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        self._span = span
        self._tracer = tracer
        self._context = set_span_in_context(span, Context())

    def child(self, name: str, attributes: Attributes) -> Span:
        from opentelemetry.trace import SpanKind

        return _Recorded(self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes), self._tracer)

    def carrier(self) -> dict[str, str]:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        return carrier

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: BaseException | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if isinstance(error, OutriderError):
            self._span.set_attribute("error.type", error.code)
            self._span.set_status(Status(StatusCode.ERROR, error.message))
        self._span.end()


class _Exported(Tracing):
    def __init__(self, endpoint: str, service: str) -> None:
        url = _url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            message = "--otlp-endpoint needs OpenTelemetry: pip install '.[tracing]' in a checkout of Outrider"
            raise StartupError(message, field="otlp_endpoint", value=endpoint) from error

        class TraceIds(RandomIdGenerator):
            def generate_trace_id(self) -> int:
                return TRACE_ID.get(0) or super().generate_trace_id()

        named = {"service.name": f"outrider-{service}", "service.namespace": "outrider"}
        resource = Resource.create(named | {"service.version": version("outrider")})
        # `close` shuts down: at exit OpenTelemetry would wait half a minute for an unreachable collector.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=TraceIds())
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=FLUSH_S)))
        self._tracer = self._provider.get_tracer("outrider", version("outrider"))

    def start(self, name: str, carrier: Mapping[str, str], attributes: Attributes) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier, Context())
        return _Recorded(self._tracer.start_span(name, parent, SpanKind.SERVER, attributes), self._tracer)

    async def close(self) -> None:
        # The thread is abandoned if the collector does not answer.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        if not await until(lambda: not sending.is_alive(), FLUSH_S):
            log.warning("last spans not sent: collector does not answer")


def _url(endpoint: str) -> str:
    """Return the URL for spans at the address of a collector."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname:
            return endpoint.rstrip("/").removesuffix(_PATH) + _PATH
    raise StartupError.of("otlp_endpoint", repr(endpoint), "a URL such as http://collector:4318")
