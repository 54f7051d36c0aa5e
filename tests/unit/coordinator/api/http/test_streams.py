"""Events of a stream, as clients split them, and whole answers, which are encoded in parts."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from structlog.testing import capture_logs

from coordinator.api.http import streams
from coordinator.api.http.failures import on_outrider_error
from coordinator.api.http.limits import RequestIds
from coordinator.api.http.streams import EventStream, WholeAnswer, _event
from outrider.protocol.errors import OutriderError, Overloaded
from tests.unit.coordinator.api.http.asgi import sent_by


def test_an_event_is_one_line_for_all_that_split_lines() -> None:
    """Such as `str.splitlines`, and so httpx: it knows more ends of lines than the standard of events."""
    data = {"text": "a\u2028b\u2029c\x85d\u000be\x1cf\n\r 世界 \u00e9"}
    (line, nothing) = _event(data).decode().splitlines()
    assert nothing == ""
    assert json.loads(line.removeprefix("data: ")) == data
    assert "世界 é".encode() in _event(data), "the rest as it is"


NESTED: Any = {
    "a": {},
    "b": [],
    "c": [[{}], [[[[[{"é": [None, True, -1.5]}]]]]]],
    "d": {"e": {"f": {"g": {"h": {"i": 1}}}}},
}


@pytest.mark.parametrize("value", [None, 1, "é", {}, [], NESTED])
def test_a_whole_answer_is_what_one_call_of_the_encoder_would_be(value: Any) -> None:
    assert WholeAnswer(value).body == JSONResponse(value).body


def test_no_call_of_the_encoder_takes_more_than_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads wait for such a call: for a tenth of a second with 4,096 tokens that have 20 log probabilities."""
    token = {"token": "x", "logprob": -1.5, "bytes": [120], "top_logprobs": [{"token": "x", "bytes": [120]}] * 20}
    lists: dict[str, Any] = {"tokens": ["x"] * 99, "top_logprobs": [{"x": -1.5}] * 99}
    calls, encode = [], streams._text

    def noted(value: Any) -> str:
        calls.append(encode(value))
        return calls[-1]

    monkeypatch.setattr(streams, "_text", noted)
    for logprobs in ({"content": [token] * 99}, lists):
        WholeAnswer({"choices": [{"index": 0, "logprobs": logprobs}] * 3})
    assert max(map(len, calls)) == len(encode(token))


def test_an_answer_without_a_number_is_no_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        WholeAnswer({"a": float("nan")})


class Held:
    """In the place of a session, which keeps its error."""

    def __init__(self) -> None:
        self.error = Overloaded("full")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_failed_leaves_nothing_to_the_collector_of_garbage(*, streamed: bool) -> None:
    """Of a stream that failed midway the session, with its prompt, stayed until a collection, which is rare."""
    held: list[weakref.ref[Held]] = []

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        session = Held()
        held.append(weakref.ref(session))
        if streamed:
            yield {"first": True}
        raise session.error

    async def answer(request: Request) -> Response:
        return await EventStream.start(events())

    app = Starlette(routes=[Route("/", answer)], exception_handlers={OutriderError: on_outrider_error})
    gc.disable()
    try:
        sent = await sent_by(app)
        assert (sent[0]["status"], "full" in str(sent)) == (200 if streamed else 429, True)
        assert [session() for session in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_internal_error_names_its_line_of_the_log(*, streamed: bool) -> None:
    """A client that reports it tells the operator where to look."""

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        if streamed:
            yield {"first": True}
        raise KeyError("x")

    async def answer(request: Request) -> Response:
        return await EventStream.start(events())

    app = RequestIds(Router([Route("/", answer)]))
    with capture_logs() as lines:
        sent = await sent_by(app)
    assert sent[0]["status"] == (200 if streamed else 500)
    [failed] = [line for line in lines if line["event"] == "request failed"]
    assert f"internal error: KeyError; see the log under {failed['reference']}" in str(sent)
    assert isinstance(failed["exc_info"], KeyError)
