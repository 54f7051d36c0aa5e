"""Clients of the HTTP API: whole answers, streams, several choices, slow readers."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx

from outrider.protocol.speculation import FinishReason
from tests.chaos.cases import Case
from tests.chaos.clients import LONGEST_S, SILENT_S, WISHES, Customer, Got, Violation
from tests.chaos.ledger import Talk

RETRIED = (408, 429, 502, 503)  # retryable by docs/http-api.md
RETRIED_CODES = ("unavailable", "peer_lost", "overloaded", "rate_limit_exceeded")
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SMALL = 4096
PAUSES = 8


class TryAgain(Exception):
    def __init__(self, after_s: float = 0.0) -> None:
        super().__init__(after_s)
        self.after_s = after_s


class HttpCustomer(Customer):
    manners = ("stream",) * 5 + ("whole",) * 3 + ("key",) * 3 + ("slow", "leave")

    async def serve(self, case: Case, manner: str, talk: Talk) -> None:
        body, path = _body(case, manner, self.rng.choice(WISHES)), _path(case)
        headers = {"authorization": f"Bearer {self.fleet.keys.api}"}
        if manner == "key" or self.rng.random() < 0.3:
            headers["idempotency-key"] = secrets.token_hex(8)
        turn = self.rng.randrange(2)
        for _ in range(1 + (manner == "key")):
            while True:
                choices = [Got(case, answer, self.ledger) for answer in case.answers or [None] * case.choices]
                try:
                    await self._once(turn, path, headers, body, choices, manner, talk)
                    break
                except TryAgain as again:
                    self.ledger.counts["http tried again"] += 1
                    turn += 1
                    await self.pause(again.after_s)
            turn += 1

    async def _once(
        self,
        turn: int,
        path: str,
        headers: dict[str, str],
        body: dict[str, Any],
        choices: list[Got],
        manner: str,
        talk: Talk,
    ) -> None:
        if manner == "slow":
            port = self.fleet.coordinators[turn % 2].http_port
            lines = _slow_lines(port, path, headers, body, self.rng.choice((0.0, 0.5, 2.0)))
            await self._listen(lines, choices, talk, 0)
            return
        base = self.fleet.webs[turn % 2]
        try:
            silent_s = SILENT_S if body["stream"] else LONGEST_S  # a whole answer arrives at once
            async with httpx.AsyncClient(base_url=base, headers=headers, timeout=silent_s, verify=False) as web:
                if not body["stream"]:
                    reply = await web.post(path, json=body)
                    _accept(reply.status_code, reply.headers, reply.text)
                    _whole(reply.json(), choices)
                    talk.heard()
                    return
                async with web.stream("POST", path, json=body) as reply:
                    if reply.status_code != 200:
                        _accept(reply.status_code, reply.headers, (await reply.aread()).decode())
                    leave_after = self.rng.randrange(1, 40) if manner == "leave" else 0
                    await self._listen(_lines(reply.aiter_bytes()), choices, talk, leave_after)
        except httpx.TimeoutException as error:
            raise Violation("hang", f"{choices[0].case.name}: {type(error).__name__} {error}") from error
        except httpx.TransportError as error:
            raise TryAgain from error

    async def _listen(self, lines: AsyncIterator[str], choices: list[Got], talk: Talk, leave_after: int) -> None:
        heard = 0
        async for line in lines:
            if line == "data: [DONE]":
                for got in choices:
                    got.check()
                return
            if not line or line.startswith(":"):
                continue
            talk.heard()
            _take(json.loads(line.removeprefix("data: ")), choices)
            heard += 1
            if heard == leave_after:
                return
        raise TryAgain


def _path(case: Case) -> str:
    return "/v1/chat/completions" if case.chat else "/v1/completions"


def _body(case: Case, manner: str, wish: dict[str, Any]) -> dict[str, Any]:
    params = dict(case.params)
    speculation = dict(wish)
    body: dict[str, Any] = {"n": case.choices, "stream": manner in ("stream", "slow", "leave")}
    if mode := params.pop("verification", None):
        speculation["verification"] = mode.lower()
    grammar = params.pop("grammar", None)
    if grammar and "regex" in grammar:
        body["response_format"] = {"type": "regex", "regex": grammar["regex"]}
    elif grammar:
        schema = {"name": "answer", "schema": json.loads(grammar["json_schema"])}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if case.chat:
        body["messages"] = [{"role": "user", "content": case.prompt}]
    else:
        body["prompt"] = case.prompt
    return body | params | {"speculation": speculation | {"show": body["stream"]}}


def _accept(status: int, headers: Any, text: str) -> None:
    """Check that the status is 200 or one documented as retryable."""
    if status == 200:
        return
    if status in RETRIED:
        if status in (429, 503) and "retry-after" not in headers:
            raise Violation("error", f"{status} without Retry-After: {text[:300]}")
        raise TryAgain(float(headers.get("retry-after-ms", 0)) / 1000)
    raise Violation("error", f"HTTP {status}: {text[:300]}")


def _whole(reply: dict[str, Any], choices: list[Got]) -> None:
    for choice, got in zip(reply["choices"], choices, strict=True):
        got.say(choice["message"]["content"] if "message" in choice else choice["text"])
        got.finish = _FINISH[choice["finish_reason"]]
        got.check()


def _take(event: dict[str, Any], choices: list[Got]) -> None:
    if "error" in event:
        code = event["error"]["code"]
        if code in RETRIED_CODES:
            raise TryAgain
        raise Violation("error", f"event {event['error']}")
    for choice in event["choices"]:
        got = choices[choice["index"]]
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        if "speculation" in choice:
            got.take(len(got.token_ids), choice["speculation"]["token_ids"], text or "")
        else:
            got.say(text or "")
        if choice["finish_reason"]:
            got.finish = _FINISH[choice["finish_reason"]]


async def _slow_lines(
    port: int, path: str, headers: dict[str, str], body: dict[str, Any], pause_s: float
) -> AsyncIterator[str]:
    """Read directly from the coordinator with a minimal buffer and pauses."""
    try:
        async with _raw(port) as (reader, writer):
            data = json.dumps(body).encode()
            head = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}", "connection: close"]
            head += ["content-type: application/json", f"content-length: {len(data)}"]
            head += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            status, found = await _head(reader)
            if status != 200:
                _accept(status, found, (await reader.read(_SMALL)).decode(errors="replace"))
            async for line in _lines(_chunks(reader, pause_s)):
                yield line
    except (OSError, asyncio.IncompleteReadError) as error:
        raise TryAgain from error


@asynccontextmanager
async def _raw(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
    plug.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=plug, limit=_SMALL * 16)
    except BaseException:
        plug.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return int(lines[0].split()[1]), found


async def _chunks(reader: asyncio.StreamReader, pause_s: float) -> AsyncIterator[bytes]:
    left = PAUSES
    while size := int(await reader.readuntil(b"\r\n"), 16):
        data = await reader.readexactly(size + 2)
        yield data[:-2]
        if left and pause_s:
            left -= 1
            await asyncio.sleep(pause_s)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Split at line feeds only: random texts contain other Unicode line separators."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()
