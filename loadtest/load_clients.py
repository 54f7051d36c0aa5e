"""Clients that send a case: over gRPC with Outrider's own client, over HTTP as OpenAI's clients do.

Both yield the output in pieces as they arrive, and raise the same errors.
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
from loadtest.workload import GRPC, HTTP, Case
from outrider.client.sync import Client, Finished, Tokens
from outrider.protocol.errors import KINDS, Expired, OutriderError, Overloaded, PeerLost, Unauthenticated, Unavailable
from outrider.security.api_keys import bearer

DONE = "[DONE]"
NONE = ClientCredentials()
_CONNECT_S = 10.0
_MAX_ERROR_BYTES = 16_384  # bytes
_ERROR_BY_STATUS: dict[int, type[OutriderError]] = {
    401: Unauthenticated,
    429: Overloaded,
    502: PeerLost,
    503: Unavailable,
    504: Expired,
}
_ERROR_BY_CODE: dict[str, type[OutriderError]] = {"rate_limit_exceeded": Overloaded, **KINDS}


class Speculation(NamedTuple):
    """Guesses of a whole output, as its statistics report them."""

    steps: int = 0  # that had guesses to check
    guesses: int = 0
    accepted: int = 0


class ReplyPiece(NamedTuple):
    """Output that arrived at once."""

    text: str
    token_ids: tuple[int, ...] | None  # None: the protocol does not send them
    output_tokens: int | None = None  # of the whole output, with its last piece
    speculation: Speculation = Speculation()  # likewise

    @property
    def arrived(self) -> bool:
        """Return whether the piece contains output."""
        return bool(self.token_ids) if self.token_ids is not None else bool(self.text)


class LoadClient(Protocol):
    """Client with a connection of its own."""

    protocol: str

    def generate(self, case: Case, gamma: int | None = None) -> Iterator[ReplyPiece]: ...

    def close(self) -> None: ...


class GrpcLoadClient:
    protocol = GRPC

    def __init__(self, endpoints: Sequence[str], timeout_s: float, credentials: ClientCredentials = NONE) -> None:
        self.client = Client(endpoints, timeout_s=timeout_s, api_key=credentials.api_key, tls=credentials.tls)

    def generate(self, case: Case, gamma: int | None = None) -> Iterator[ReplyPiece]:
        prompt = case.prompt
        for reply in self.client.generate(prompt.text or None, chat=prompt.chat, params=case.params, gamma=gamma):
            if isinstance(reply, Tokens):
                yield ReplyPiece(reply.text, reply.token_ids)
            elif isinstance(reply, Finished):
                stats = reply.stats
                speculation = Speculation(stats.drafts, stats.draft_tokens, stats.accepted_tokens)
                yield ReplyPiece(reply.text, (), reply.output_tokens, speculation)

    def close(self) -> None:
        self.client.close()


class HttpStatusError(OutriderError):
    """Response status that has no error class of its own."""

    code = "http"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpLoadClient:
    """Client of the OpenAI-compatible API's streams, over one kept connection.

    It uses urllib3 instead of locust's HTTP users: these report a request
    when its headers arrive, which is when a stream begins.
    """

    protocol = HTTP

    def __init__(self, endpoint: str, timeout_s: float, credentials: ClientCredentials = NONE, model: str = "") -> None:
        self._timeout_s = timeout_s
        self._model = model
        self._headers = {"Authorization": bearer(credentials.api_key)} if credentials.api_key else {}
        given: dict[str, Any] = {"ssl_context": credentials.context} if credentials.context else {}
        if credentials.tls and credentials.tls.name:
            given["server_hostname"] = credentials.tls.name
        self._pool = urllib3.connection_from_url(
            f"{'https' if credentials.context else 'http'}://{endpoint}",
            timeout=urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
            retries=False,
            **given,
        )

    def served_model(self) -> str:
        return str(self._get_json("/v1/models", lambda body: body["data"][0]["id"]))

    def capacity(self) -> int:
        """Return the sessions that the fleet runs at once with the model of this load."""
        served = self._get_json("/v1/models", lambda body: body["data"][0]["root"])

        def of_target(body: Any) -> int:
            found = (each for each in body["workers"] if each["role"] == "verifier" and each["model"]["name"] == served)
            return sum(each["capacity"] for each in found)

        return int(self._get_json("/fleet", of_target))

    def generate(self, case: Case, gamma: int | None = None) -> Iterator[ReplyPiece]:
        path = "/v1/chat/completions" if case.prompt.chat else "/v1/completions"
        until = time.monotonic() + self._timeout_s
        with self._reply("POST", path, json=self._body(case, gamma)) as reply:
            for piece in stream_pieces(events(reply)):
                yield piece
                if time.monotonic() > until:  # the pool's timeout limits one read, not the whole stream
                    raise Expired("the deadline passed before the output was complete")

    def close(self) -> None:
        self._pool.close()

    def _get_json(self, path: str, select: Callable[[Any], Any]) -> Any:
        with self._reply("GET", path) as reply:
            try:
                return select(json.loads(reply.data))
            except (ValueError, LookupError, TypeError) as error:
                raise Unavailable(f"unexpected reply to {path}: is this Outrider's HTTP endpoint?") from error

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
        """Keep the connection if the reply is read to its end; close it otherwise."""
        reply: urllib3.BaseHTTPResponse | None = None
        try:
            reply = self._pool.request(method, path, headers=self._headers, preload_content=False, **more)
            if reply.status != 200:
                raise status_error(reply.status, reply.read(_MAX_ERROR_BYTES), reply.headers)
            yield reply
            reply.release_conn()
        except urllib3.exceptions.NewConnectionError as error:  # a subclass of TimeoutError in urllib3
            raise PeerLost(f"{method} {path}: {error}") from error
        except urllib3.exceptions.TimeoutError as error:
            raise Expired(f"{method} {path}: timeout") from error
        except urllib3.exceptions.HTTPError as error:
            raise PeerLost(f"{method} {path}: {error}") from error
        finally:
            if reply is not None:
                reply.close()


def stream_pieces(data: Iterator[str]) -> Iterator[ReplyPiece]:
    """Yield the pieces of a streamed completion or chat completion, given the data of its events."""
    try:
        yield from _pieces(data)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OutriderError(f"stream event is not a chunk: {error!r}") from error


def _pieces(data: Iterator[str]) -> Iterator[ReplyPiece]:
    finished = False
    output_tokens: int | None = None
    speculation = Speculation()
    for event in data:
        if event == DONE:
            if not finished or output_tokens is None:
                raise PeerLost("the stream ended without " + ("a usage" if finished else "a finish_reason"))
            yield ReplyPiece("", None, output_tokens, speculation)
            # Read to the end of the stream, so that the connection can be kept.
            if (more := next(data, None)) is not None:
                raise OutriderError(f"unexpected event after {DONE}: {more[:80]}")
            return
        chunk = _parsed(event)
        if "error" in chunk:
            raise _error(chunk["error"])
        if chunk.get("usage"):
            output_tokens = int(chunk["usage"]["completion_tokens"])
        if told := (chunk.get("metrics") or {}).get("speculative_decoding"):
            names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
            speculation = Speculation(*(int(told[name]) for name in names))
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            text = choice["text"] if "text" in choice else delta.get("reasoning_content") or delta.get("content")
            if text:
                yield ReplyPiece(text, None)
            finished = finished or choice.get("finish_reason") is not None
    raise PeerLost(f"the stream ended without {DONE}")


def status_error(status: int, body: bytes, headers: Any) -> OutriderError:
    """Return the error for a status other than 200."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code"))
    except (ValueError, LookupError, TypeError):
        message, code = body[:120].decode(errors="replace"), ""
    kind = _ERROR_BY_STATUS.get(status) or _ERROR_BY_CODE.get(code)
    if kind is None:
        return HttpStatusError(f"HTTP {status}: {message}", status)
    return kind(message, retry_after_ms=_retry_after_ms(headers))


def error_name(error: OutriderError) -> str:
    """Return the name under which an error is counted."""
    return f"http {error.status}" if isinstance(error, HttpStatusError) else error.code


def _parsed(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError as error:
        raise OutriderError(f"stream event is not JSON: {event[:80]}") from error
    if not isinstance(chunk, dict) or ("error" not in chunk and "choices" not in chunk):
        raise OutriderError(f"stream event is not a chunk: {event[:80]}")
    return chunk


def _error(body: Any) -> OutriderError:
    if not isinstance(body, dict):
        return OutriderError(f"the stream ended with an error: {body}")
    return _ERROR_BY_CODE.get(str(body.get("code")), OutriderError)(str(body.get("message")))


def _retry_after_ms(headers: Any) -> int | None:
    """Return the Retry-After header if it is in seconds; Outrider does not send the date form."""
    given = str(headers.get("Retry-After", ""))
    return 1000 * int(given) if given.isdecimal() else None
