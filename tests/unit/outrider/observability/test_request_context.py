"""Whom a request is from: ids and traces that come in with a call and go out with the next."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

import pytest
from structlog.contextvars import get_contextvars

from outrider.observability.request_context import REQUEST_ID, RequestContext, bind_context, current
from outrider.observability.tracing import NO_SPAN, Span

T = TypeVar("T")
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}


def apart(function: Callable[[], T]) -> T:
    """As in the task of a call of its own."""
    return copy_context().run(function)


def test_what_came_is_taken_up_bound_to_the_logs_and_sent_on() -> None:
    def call() -> None:
        origin = bind_context([(REQUEST_ID, "r-1"), *TRACE.items(), ("user-agent", "x"), ("key-bin", b"\x00")])
        assert origin == current() == RequestContext("r-1", TRACE)
        assert get_contextvars() == {"request_id": "r-1"}
        assert dict(origin.metadata(NO_SPAN)) == {REQUEST_ID: "r-1", **TRACE}, "untraced here, it goes on all the same"

    apart(call)
    assert current() == RequestContext()
    assert "request_id" not in get_contextvars()


def test_a_traced_hop_is_told_of_our_span() -> None:
    class Ours(Span):
        def carrier(self) -> dict[str, str]:
            return {"traceparent": "ours"}

    assert dict(RequestContext("r-1", TRACE).metadata(Ours())) == {REQUEST_ID: "r-1", "traceparent": "ours"}


@pytest.mark.parametrize("unsound", ["x" * 513, "ü", "line\nbreak"])
def test_a_trace_that_could_not_be_sent_on_is_not_taken(unsound: str) -> None:
    carrier = apart(lambda: bind_context([*TRACE.items(), ("tracestate", unsound)]).carrier)
    assert carrier == {"traceparent": TRACE["traceparent"]}


def test_the_first_edge_names_what_has_no_name() -> None:
    one, other = (apart(lambda: bind_context((), first=True).request_id) for _ in range(2))
    assert one
    assert other
    assert one != other
    assert apart(lambda: bind_context(()).request_id) == "", "a worker makes nothing up"


@pytest.mark.parametrize("forged", ["", "two words", "line\nbreak", "ü", "x" * 129, "\x1b[31m"])
def test_an_id_that_would_spoil_a_log_is_not_taken(forged: str) -> None:
    assert apart(lambda: bind_context([(REQUEST_ID, forged)]).request_id) == ""
    assert apart(lambda: bind_context([(REQUEST_ID, forged)], first=True).request_id) not in ("", forged)
