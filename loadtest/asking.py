"""How a case is asked: over gRPC as Outrider's own client does it, over HTTP as OpenAI's clients do.

Both give the answer in pieces as they arrive, and raise the same errors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import urllib3

from loadtest.credentials import ClientCredentials
from loadtest.sse import events
from loadtest.workload import Case
from outrider.client.sync import Client, Finished, Tokens
from outrider.protocol.errors import KINDS, Expired, OutriderError, Overloaded, PeerLost, Unauthenticated, Unavailable
from outrider.security.api_keys import bearer

GRPC, HTTP = "grpc", "http"
PROTOCOLS = (GRPC, HTTP)
DONE = "[DONE]"
NONE = ClientCredentials()
_CONNECT_S = 10.0
_LARGEST_ERROR = 16_384  # bytes
_OF_STATUS: dict[int, type[OutriderError]] = {
    401: Unauthenticated,
    429: Overloaded,
    502: PeerLost,
    503: Unavailable,
    504: Expired,
}
_OF_CODE: dict[str, type[OutriderError]] = {"rate_limit_exceeded": Overloaded, **KINDS}


class ReplyPiece(NamedTuple):
    """What came at once."""

    text: str
    token_ids: tuple[int, ...] | None  # None: the protocol does not tell
    output_tokens: int | None = None  # of the whole answer, with its last piece

    @property
    def arrived(self) -> bool:
        """Whether it brought output, and not only word about it."""
        return bool(self.token_ids) if self.token_ids is not None else bool(self.text)


class Asker(Protocol):
    """One client with a connection of its own."""

    protocol: str

    def ask(self, case: Case, gamma: int | None = None) -> Iterator[ReplyPiece]: ...

    def close(self) -> None: ...


class OverGrpc:
    protocol = GRPC

    def __init__(self, endpoints: Sequence[str], timeout_s: float, shown: ClientCredentials = NONE) -> None:
        self.client = Client(endpoints, timeout_s=timeout_s, api_key=shown.api_key, tls=shown.tls)

    def ask(self, case: Case, gamma: int | None = None) -> Iterator[ReplyPiece]:
        prompt = case.prompt
        for reply in self.client.generate(prompt.text or None, chat=prompt.chat, params=case.params, gamma=gamma):
            if isinstance(reply, Tokens):
                yield ReplyPiece(reply.text, reply.token_ids)
            elif isinstance(reply, Finished):
                yield ReplyPiece(reply.text, (), reply.output_tokens)

    def close(self) -> None:
        self.client.close()


class HttpRefusal(OutriderError):
    """A status that none of our errors stands for."""

    code = "http"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OverHttp:
    """Streams of the OpenAI-compatible API, over one connection that is kept.

    urllib3 and not locust's own HTTP users: those report one request when its
    headers have come, and an answer that streams has only begun by then.
    """

    protocol = HTTP

    def __init__(self, endpoint: str, timeout_s: float, shown: ClientCredentials = NONE, model: str = "") -> None:
        self._timeout_s = timeout_s
        self._model = model
        self._headers = {"Authorization": bearer(shown.api_key)} if shown.api_key else {}
        given: dict[str, Any] = {"ssl_context": shown.context} if shown.context else {}
        self._pool = urllib3.connection_from_url(
            f"{'https' if shown.context else 'http'}://{endpoint}",
            timeout=urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
            retries=False,
            **given,
        )

    def served_model(self) -> str:
        return str(self._told("/v1/models", lambda told: told["data"][0]["id"]))

    def capacity(self) -> int:
        """Sessions that the fleet takes at once."""
        return int(
            self._told("/fleet", lambda told: sum(w["capacity"] for w in told["workers"] if w["role"] == "verifier"))
        )

    def ask(self, case: Case, gamma: int | None = None) -> Iterator[ReplyPiece]:
        path = "/v1/chat/completions" if case.prompt.chat else "/v1/completions"
        until = time.monotonic() + self._timeout_s
        with self._reply("POST", path, json=self._body(case, gamma)) as reply:
            for piece in answer(events(reply)):
                yield piece
                if time.monotonic() > until:  # the pool's timeout is for one silence, not for the whole
                    raise Expired("the deadline passed before the output was complete")

    def close(self) -> None:
        self._pool.close()

    def _told(self, path: str, wanted: Callable[[Any], Any]) -> Any:
        with self._reply("GET", path) as reply:
            try:
                return wanted(json.loads(reply.data))
            except (ValueError, LookupError, TypeError) as error:
                raise Unavailable(f"{path} does not tell: is this Outrider's HTTP endpoint?") from error

    def _body(self, case: Case, gamma: int | None) -> dict[str, Any]:
        params = case.params
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if case.prompt.chat:
            body["messages"] = [{"role": role, "content": content} for role, content in case.prompt.chat]
        else:
            body["prompt"] = case.prompt.text
        if gamma is not None:
            body["speculation"] = {"gamma": gamma}
        return {name: value for name, value in body.items() if value is not None}

    @contextmanager
    def _reply(self, method: str, path: str, **more: Any) -> Iterator[urllib3.BaseHTTPResponse]:
        """Read to its end the connection is kept, left earlier it is closed."""
        reply: urllib3.BaseHTTPResponse | None = None
        try:
            reply = self._pool.request(method, path, headers=self._headers, preload_content=False, **more)
            if reply.status != 200:
                raise refusal(reply.status, reply.read(_LARGEST_ERROR), reply.headers)
            yield reply
            reply.release_conn()
        except urllib3.exceptions.NewConnectionError as error:  # which urllib3 counts among timeouts
            raise PeerLost(f"{method} {path}: {error}") from error
        except urllib3.exceptions.TimeoutError as error:
            raise Expired(f"{method} {path}: nothing came in time") from error
        except urllib3.exceptions.HTTPError as error:
            raise PeerLost(f"{method} {path}: {error}") from error
        finally:
            if reply is not None:
                reply.close()


def answer(data: Iterator[str]) -> Iterator[ReplyPiece]:
    """The pieces of a streamed completion or chat completion, from the data of its events."""
    finished = False
    output_tokens: int | None = None
    for event in data:
        if event == DONE:
            if not finished or output_tokens is None:
                raise PeerLost("the stream ended without " + ("a usage" if finished else "a finish_reason"))
            yield ReplyPiece("", None, output_tokens)
            # Nothing follows; reading on to the end keeps the connection.
            if (more := next(data, None)) is not None:
                raise OutriderError(f"the stream goes on after {DONE}: {more[:80]}")
            return
        chunk = _parsed(event)
        if "error" in chunk:
            raise _error(chunk["error"])
        if chunk.get("usage"):
            output_tokens = int(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                yield ReplyPiece(text, None)
            finished = finished or choice.get("finish_reason") is not None
    raise PeerLost(f"the stream ended without {DONE}")


def refusal(status: int, body: bytes, headers: Any) -> OutriderError:
    """What a status other than 200 means."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code"))
    except (ValueError, LookupError, TypeError):
        message, code = body[:120].decode(errors="replace"), ""
    kind = _OF_STATUS.get(status) or _OF_CODE.get(code)
    if kind is None:
        return HttpRefusal(f"HTTP {status}: {message}", status)
    return kind(message, retry_after_ms=_retry_after_ms(headers))


def named(error: OutriderError) -> str:
    """What a failure is counted as."""
    return f"http {error.status}" if isinstance(error, HttpRefusal) else error.code


def _parsed(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError as error:
        raise OutriderError(f"an event of the stream is no JSON: {event[:80]}") from error
    if not isinstance(chunk, dict) or ("error" not in chunk and "choices" not in chunk):
        raise OutriderError(f"an event of the stream is no chunk: {event[:80]}")
    return chunk


def _error(told: Any) -> OutriderError:
    if not isinstance(told, dict):
        return OutriderError(f"the stream ended with an error: {told}")
    return _OF_CODE.get(str(told.get("code")), OutriderError)(str(told.get("message")))


def _retry_after_ms(headers: Any) -> int | None:
    """Seconds, as whole numbers; the other form, a date, is not one that Outrider sends."""
    given = str(headers.get("Retry-After", ""))
    return 1000 * int(given) if given.isdecimal() else None
