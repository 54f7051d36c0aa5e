"""How the load test reads streams over HTTP: events, answers, errors, and one connection on a real socket."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadtest.credentials import ClientCredentials
from loadtest.load_clients import (
    DONE,
    HttpLoadClient,
    HttpStatusError,
    ReplyPiece,
    Speculation,
    error_name,
    status_error,
    stream_pieces,
)
from loadtest.sse import events
from loadtest.workload import Case, cases
from outrider.protocol.errors import (
    Expired,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    PeerLost,
    Unauthenticated,
    Unavailable,
)
from tests.certificates import Authority

SOON_S = 5.0
CHAT, TEXT = cases("chat", 8)[0], cases("code", 8)[0]


# Events.


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (b"data: one\n\ndata: two\n\n", ["one", "two"]),
        (b"data: one\r\n\r\ndata:two\r\n\r\n", ["one", "two"]),
        (b"data: one\ndata: more\n\n", ["one\nmore"]),
        (b": ping\n\nevent: x\nid: 3\ndata: one\n\n: ping\n", ["one"]),
        (b"data: one\n\ndata: cut off\n", ["one"]),
        (b"data:  two spaces\n\n", [" two spaces"]),
        (b"", []),
        ("data: für\n\n".encode(), ["für"]),
    ],
)
def test_events_are_told_apart(stream: bytes, found: list[str]) -> None:
    assert list(events(stream.splitlines(keepends=True))) == found


# Answers.


def chat_chunk(content: str | None, reason: str | None = None, thought: str = "") -> str:
    delta = {"content": content} | ({"reasoning_content": thought} if thought else {})
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def text_chunk(text: str, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None})


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})


@pytest.mark.parametrize(
    "chunks",
    [
        [chat_chunk(""), chat_chunk("one "), chat_chunk(None), chat_chunk("two"), chat_chunk(None, "stop")],
        [text_chunk("one "), text_chunk("two", "length")],
        [chat_chunk(None, thought="one "), chat_chunk("two", "stop")],
    ],
    ids=["chat", "text", "reasoning"],
)
def test_an_answer_is_its_pieces_and_their_number(chunks: list[str]) -> None:
    assert list(stream_pieces(iter([*chunks, USAGE, DONE]))) == [
        ReplyPiece("one ", None),
        ReplyPiece("two", None),
        ReplyPiece("", None, 3),
    ]


def test_the_last_piece_tells_what_was_guessed() -> None:
    told = {"num_spec_steps": 2, "num_draft_tokens": 5, "num_accepted_draft_tokens": 1, "mean_acceptance_length": 1.5}
    usage = json.loads(USAGE) | {"metrics": {"speculative_decoding": told}}
    *_, last = stream_pieces(iter([text_chunk("one", "stop"), json.dumps(usage), DONE]))
    assert last == ReplyPiece("", None, 3, Speculation(steps=2, guesses=5, accepted=1))


@pytest.mark.parametrize(
    ("stream", "kind", "says"),
    [
        ([text_chunk("one")], PeerLost, r"without \[DONE\]"),
        ([text_chunk("one"), USAGE, DONE], PeerLost, "without a finish_reason"),
        ([text_chunk("one", "stop"), DONE], PeerLost, "without a usage"),
        ([text_chunk("one", "stop"), USAGE, DONE, "more"], OutriderError, "unexpected event after"),
        (["{"], OutriderError, "not JSON"),
        (["[1]"], OutriderError, "not a chunk"),
        (['{"choices": null}'], OutriderError, "not a chunk"),
        (['{"choices": [{"delta": null}]}'], OutriderError, "not a chunk"),
        (['{"choices": [1]}'], OutriderError, "not a chunk"),
        (['{"choices": [], "usage": {"prompt_tokens": 3}}'], OutriderError, "not a chunk"),
        (['{"choices": [], "usage": {"completion_tokens": "many"}}'], OutriderError, "not a chunk"),
        (['{"choices": [], "metrics": {"speculative_decoding": {"num_spec_steps": 1}}}'], OutriderError, "not a chunk"),
        (['{"error": {"message": "full", "code": "rate_limit_exceeded"}}'], Overloaded, "full"),
        (['{"error": {"message": "gone", "code": "peer_lost"}}'], PeerLost, "gone"),
        (['{"error": {"message": "odd", "code": "new"}}'], OutriderError, "odd"),
        (['{"error": "odd"}'], OutriderError, "odd"),
    ],
)
def test_an_answer_that_is_not_whole_raises(stream: list[str], kind: type[OutriderError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        list(stream_pieces(iter(stream)))
    assert type(caught.value) is kind


def test_an_answer_that_is_no_text_raises() -> None:
    with pytest.raises(OutriderError, match="not a chunk: UnicodeDecodeError"):
        list(stream_pieces(events([b"data: \xff\n", b"\n"])))


@pytest.mark.parametrize(
    ("status", "code", "kind", "name"),
    [
        (429, "rate_limit_exceeded", Overloaded, "overloaded"),
        (503, "unavailable", Unavailable, "unavailable"),
        (502, "peer_lost", PeerLost, "peer_lost"),
        (504, "expired", Expired, "expired"),
        (400, "invalid_request", InvalidRequest, "invalid_request"),
        (404, "not_found", NotFound, "not_found"),
        (401, "invalid_api_key", Unauthenticated, "unauthenticated"),
        (403, "not here", HttpStatusError, "http 403"),
        (500, "who knows", HttpStatusError, "http 500"),
    ],
)
def test_a_status_means_what_it_means_over_grpc(status: int, code: str, kind: type[OutriderError], name: str) -> None:
    body = json.dumps({"error": {"message": "why", "type": "t", "param": None, "code": code}}).encode()
    error = status_error(status, body, {"Retry-After": "3"})
    assert type(error) is kind
    assert error_name(error) == name
    assert "why" in error.message
    assert error.retry_after_ms == (None if kind is HttpStatusError else 3000)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "x"}', b"\xff"])
def test_a_refusal_need_not_be_in_openais_shape(body: bytes) -> None:
    assert type(status_error(429, body, {"Retry-After": "soon"})) is Overloaded
    assert status_error(429, body, {"Retry-After": "soon"}).retry_after_ms is None
    assert error_name(status_error(418, body, {})) == "http 418"


# Over a real socket.


class Handler(BaseHTTPRequestHandler):
    """Sends what `reply` of its server says, in chunks, each as soon as it is said."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        self.server.connections += 1
        super().setup()

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self._answer({})

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization", ""), body))
        status, headers, parts = self.server.reply(len(self.server.asked))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            if part is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""


Reply = tuple[int, dict[str, str], Iterator[bytes | None]]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, reply: Callable[[int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.connections = 0
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def handle_error(self, *_: object) -> None:
        """A client that leaves is part of these tests."""


class Serving:
    def __init__(self, reply: Callable[[int], Reply], **more: Any) -> None:
        self.server = Server(reply)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        host, port = self.server.server_address[:2]
        self.asker = HttpLoadClient(f"{host}:{port}", **({"timeout_s": SOON_S} | more))

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.asker.close()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def ask(self, case: Case) -> list[ReplyPiece]:
        return list(self.asker.generate(case))


def sse(*data: str) -> Iterator[bytes]:
    return iter([f"data: {each}\n\n".encode() for each in data])


def merge_all(_: int) -> Reply:
    return 200, {}, sse(text_chunk("one "), text_chunk("two", "stop"), USAGE, DONE)


def test_pieces_come_as_they_are_sent() -> None:
    """The server says no more before the first piece has been read."""
    heard = threading.Event()

    def slowly(_: int) -> Reply:
        def parts() -> Iterator[bytes]:
            yield from sse(text_chunk("one "))
            assert heard.wait(SOON_S)
            yield from sse(text_chunk("two", "stop"), USAGE, DONE)

        return 200, {}, parts()

    with Serving(slowly) as serving:
        pieces = serving.asker.generate(TEXT)
        assert next(pieces) == ReplyPiece("one ", None)
        heard.set()
        assert list(pieces) == [ReplyPiece("two", None), ReplyPiece("", None, 3)]


def test_a_connection_is_kept_until_an_answer_is_left() -> None:
    with Serving(merge_all) as serving:
        for _ in range(3):
            assert len(serving.ask(TEXT)) == 3
        assert serving.server.connections == 1
        left = serving.asker.generate(TEXT)
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert len(serving.ask(TEXT)) == 3
        assert serving.server.connections == 2


def test_an_answer_that_is_left_is_hung_up_on() -> None:
    """The fleet must not go on for nobody."""
    noticed = threading.Event()

    def endlessly(_: int) -> Reply:
        def parts() -> Iterator[bytes]:
            try:
                while True:
                    yield from sse(text_chunk("on and on " * 1000))
            finally:
                noticed.set()

        return 200, {}, parts()

    with Serving(endlessly) as serving:
        left = serving.asker.generate(TEXT)
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert noticed.wait(SOON_S)


def test_a_request_is_openais_with_the_key() -> None:
    with Serving(merge_all, credentials=ClientCredentials("secret"), model="m") as serving:
        serving.ask(TEXT)
        serving.ask(CHAT)
        list(serving.asker.generate(TEXT, gamma=0))
    (path, key, body), (chat_path, _, chat), (_, _, plain) = serving.server.asked
    assert (path, chat_path, key) == ("/v1/completions", "/v1/chat/completions", "Bearer secret")
    assert body["prompt"] == TEXT.prompt.text
    assert chat["messages"] == [{"role": role, "content": text} for role, text in CHAT.prompt.chat]
    common = {"model": "m", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    assert common.items() <= body.items()
    assert common.items() <= chat.items()
    assert "speculation" not in body, "what users send has no extension of ours"
    assert plain["speculation"] == {"gamma": 0}
    assert (chat["temperature"], chat.get("seed")) == (CHAT.params.temperature, CHAT.params.seed)


@pytest.mark.parametrize("name", ["fleet.example", ""])
def test_a_certificate_may_have_another_name_than_the_endpoint(name: str, tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    pair = authority.issue("fleet", hosts=["fleet.example"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    credentials = ClientCredentials.load(tls_ca=str(authority.path), tls_name=name)
    with Serving(merge_all, credentials=credentials) as serving:
        serving.server.socket = context.wrap_socket(serving.server.socket, server_side=True)
        if name:
            assert len(serving.ask(TEXT)) == 3
        else:
            with pytest.raises(PeerLost, match="certificate"):
                serving.ask(TEXT)


def test_a_refusal_says_when_to_come_back() -> None:
    error = b'{"error": {"message": "full", "type": "rate_limit_error", "param": null, "code": "rate_limit_exceeded"}}'
    with (
        Serving(lambda _: (429, {"Retry-After": "2"}, iter([error]))) as serving,
        pytest.raises(Overloaded, match="full") as caught,
    ):
        serving.ask(TEXT)
    assert caught.value.retry_after_ms == 2000


def test_a_stream_that_breaks_is_a_lost_peer_and_the_next_one_works() -> None:
    def once(number: int) -> Reply:
        return (200, {}, iter([next(sse(text_chunk("one "))), None])) if number == 1 else merge_all(number)

    with Serving(once) as serving:
        with pytest.raises(PeerLost):
            serving.ask(TEXT)
        assert len(serving.ask(TEXT)) == 3


def test_nobody_there_is_a_lost_peer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        asker = HttpLoadClient(f"127.0.0.1:{taken.getsockname()[1]}", timeout_s=SOON_S)
        with pytest.raises(PeerLost):
            list(asker.generate(TEXT))


@pytest.mark.parametrize("trickles", [False, True])
def test_the_deadline_holds_for_silence_and_for_a_trickle(trickles: bool) -> None:
    over = threading.Event()

    def parts() -> Iterator[bytes]:
        yield from sse(text_chunk("one "))
        while not over.wait(0.02 if trickles else SOON_S):
            yield from sse(text_chunk("more "))

    with Serving(lambda _: (200, {}, parts()), timeout_s=0.2) as serving:
        with pytest.raises(Expired):
            serving.ask(TEXT)
        over.set()


def test_the_fleet_is_asked_what_it_is() -> None:
    workers = [
        {"role": "verifier", "capacity": 4, "model": {"name": "weights"}},
        {"role": "drafter", "capacity": 9, "model": {"name": "weights"}},
        {"role": "verifier", "capacity": 2, "model": {"name": "weights"}},
        {"role": "verifier", "capacity": 7, "model": {"name": "others"}},
    ]
    listed = json.dumps({"data": [{"id": "tiny", "root": "weights"}], "workers": workers}).encode()
    with Serving(lambda _: (200, {}, iter([listed]))) as serving:
        assert serving.asker.served_model() == "tiny"
        assert serving.asker.capacity() == 6
        assert [path for path, _, _ in serving.server.asked] == ["/v1/models", "/v1/models", "/fleet"]
        assert serving.server.connections == 1
    for odd in (b"<html>", b"[]", b'{"data": []}'):
        with Serving(lambda _, odd=odd: (200, {}, iter([odd]))) as serving:
            with pytest.raises(Unavailable, match="/v1/models"):
                serving.asker.served_model()
            with pytest.raises(Unavailable, match="/v1/models"):
                serving.asker.capacity()
