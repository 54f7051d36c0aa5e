"""Sender of cases, with checks of the response: no server fault, and an answer in time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc._cython import cygrpc

from outrider.protocol import convert
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.fuzz.case import ABANDON, CANCEL, HALF_CLOSE, Case
from tests.fuzz.generators import quick
from tests.fuzz.values import SESSION

ANSWER_S = 5.0
LISTEN_S = 0.15  # if no answer is required
LONG_S = 0.3  # for a long answer
REPORT_S = 0.05  # between two reports of a worker that a coordinator reads
REPLIES = 40
MAX_MESSAGE = 4_000  # characters of an error: no input of megabytes is echoed
MAX_HEARD = 300_000
_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_UNARY = ("/Cancel", "/GetModelInfo", "/GetServerInfo", "/Probe", "/Check")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_PLAIN = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(slots=True)
class Outcome:
    """Outcome of a case. `problem` describes a violation and is empty without one."""

    result: str = ""  # OK, a status, or another category
    problem: str = ""
    replies: list[bytes] = field(default_factory=list)
    details: str = ""
    late: bool = False  # the problem is a timeout


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_PLAIN)


async def send(case: Case, channel: grpc.aio.Channel, http: str, h2: str) -> Outcome:
    """Send a case. `http` and `h2` are the addresses for raw connections."""
    if case.method == "http":
        return await connect(case, http, http=True)
    if case.method == "h2":
        return await connect(case, h2, http=False)
    messages = case.messages
    if case.prelude:
        messages = await _with_session(case, channel)
    elif case.edge != "grpc":
        messages = tuple(message.replace(SESSION.encode(), _own_session(case)) for message in messages)
    return await call(channel, case.method, messages, case.end)


def _own_session(case: Case) -> bytes:
    """Give every stream its own session id; otherwise most streams would compete for one session."""
    return hashlib.sha256(b"".join(case.messages)).hexdigest()[: len(SESSION)].encode()


async def _with_session(case: Case, channel: grpc.aio.Channel) -> tuple[bytes, ...]:
    """Start the session that the messages refer to; disconnect during it, or read it to its end."""
    begun = await call(channel, "/outrider.v1.Outrider/Generate", (case.prelude,), CANCEL)
    replies = [pb.GenerateReply.FromString(reply) for reply in begun.replies]
    if not replies or not replies[0].HasField("started"):
        return case.messages
    session_id = replies[0].started.session_id.encode()
    return tuple(message.replace(SESSION.encode(), session_id) for message in case.messages)


# gRPC.


async def call(channel: grpc.aio.Channel, method: str, messages: tuple[bytes, ...], end: str) -> Outcome:
    """Make a call without message classes: bytes in, bytes out."""
    outcome = Outcome()
    try:
        async with asyncio.timeout(3 * ANSWER_S):
            with contextlib.suppress(grpc.aio.UsageError, asyncio.InvalidStateError):
                await _speak(channel, method, messages, end, outcome)
    except grpc.aio.AioRpcError as error:
        _judge(error.code(), error.details() or "", error.trailing_metadata(), outcome)
    except TimeoutError:
        outcome.late = True
        outcome.problem = f"no end in {3 * ANSWER_S:g} s"
    return outcome


async def _speak(
    channel: grpc.aio.Channel, method: str, messages: tuple[bytes, ...], end: str, outcome: Outcome
) -> None:
    if method.endswith(_UNARY):
        outcome.replies.append(await _in_time(channel.unary_unary(method)(messages[0]), outcome))
        outcome.result = "OK"
        return
    if method.endswith(("/Generate", "/Resume")):
        stream: Any = channel.unary_stream(method)(messages[0])
        long = method.endswith("/Resume") or not quick(messages)
        patience = LONG_S if long else ANSWER_S
    else:
        stream = channel.stream_stream(method)()
        patience = ANSWER_S + REPORT_S * len(messages) * method.endswith("/Register")
        await _write(stream, messages, end)
    try:
        if end == ABANDON:
            outcome.result = "abandoned"
        else:
            await _read(stream, patience, end, outcome)
    finally:
        stream.cancel()


async def _write(stream: Any, messages: tuple[bytes, ...], end: str) -> None:
    """Write without the library's `write`, which reports INTERNAL for an ended stream and loses its status."""
    await stream.wait_for_connection()
    try:
        for message in messages:
            await stream._cython_call.send_serialized_message(message)
        if end == HALF_CLOSE:
            await stream._cython_call.send_receive_close()
    except cygrpc.InternalError:
        return  # it has ended; reading returns its status


async def _in_time(answer: Any, outcome: Outcome) -> Any:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        outcome.late = True
        outcome.problem = f"no answer in {ANSWER_S:g} s"
        return b""


async def _read(stream: Any, patience: float, end: str, outcome: Outcome) -> None:
    """Require the first answer, then the end of a call that is short or that we ended."""
    reply = await _in_time(stream.read(), outcome)
    while reply is not grpc.aio.EOF and not outcome.problem and len(outcome.replies) < REPLIES:
        outcome.replies.append(reply)
        _judge_reply(reply, stream, outcome)
        try:
            async with asyncio.timeout(patience):
                reply = await stream.read()
        except TimeoutError:
            if patience >= ANSWER_S and end == HALF_CLOSE:
                outcome.late = True
                outcome.problem = f"no end in {patience:g} s after all was said; {len(outcome.replies)} replies came"
            outcome.result = outcome.result or "cancelled by us"
            return
    if reply is grpc.aio.EOF:
        _judge(await stream.code(), await stream.details() or "", await stream.trailing_metadata(), outcome)
    outcome.result = outcome.result or "cancelled by us"


def _judge_reply(reply: bytes, stream: Any, outcome: Outcome) -> None:
    """Check the errors that arrive within a stream."""
    if b"internal" not in reply:
        return
    try:
        error = pb.GenerateReply.FromString(reply).error
    except Exception:
        return
    if error.code == "internal":
        outcome.problem = f"internal error in a stream: {error.message}"


def _judge(code: grpc.StatusCode, details: str, metadata: Any, outcome: Outcome) -> None:
    outcome.result, outcome.details = code.name, details
    if code in _FAULTS:
        outcome.problem = f"{code.name}: {details[:300]}"
    if len(details) > MAX_MESSAGE:
        outcome.problem = f"{code.name} with a message of {len(details)} characters"
    for name, value in metadata or ():
        if name == convert.ERROR_KEY and len(value) > MAX_MESSAGE:
            error = common.Error.FromString(value)
            outcome.problem = f"an error of {len(value)} bytes: {error.message[:200]}"


# Raw connections.


@asynccontextmanager
async def _connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def connect(case: Case, address: str, *, http: bool) -> Outcome:
    outcome = Outcome()
    try:
        async with _connection(address) as (reader, writer):
            talking = asyncio.create_task(_talk(writer, case.messages))
            try:
                await _listen(reader, case, outcome, http=http)
            finally:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
    except OSError as error:
        outcome.result = type(error).__name__
    return outcome


async def _talk(writer: asyncio.StreamWriter, pieces: tuple[bytes, ...]) -> None:
    with contextlib.suppress(OSError):  # closed by the server
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0)


async def _listen(reader: asyncio.StreamReader, case: Case, outcome: Outcome, *, http: bool) -> None:
    heard = b""
    patience = ANSWER_S if case.complete else LISTEN_S
    while len(heard) < MAX_HEARD and not _answered(heard, http=http):
        try:
            async with asyncio.timeout(patience):
                more = await reader.read(65_536)
        except TimeoutError:
            if case.complete:
                outcome.late = True
                outcome.problem = f"no answer in {ANSWER_S:g} s; heard {heard[:200]!r}"
            break
        if not more:
            break
        heard += more
    outcome.replies.append(heard[:2_000])
    statuses = [int(status) for status in _STATUS.findall(heard)] if http else []
    outcome.result = str(statuses[0]) if statuses else "heard" if heard else "nothing"
    if 500 in statuses or (b'"type":"server_error"' in heard and b'"code":"internal"' in heard):
        outcome.problem = f"a fault of the server's: {heard[:400]!r}"


def _answered(heard: bytes, *, http: bool) -> bool:
    if not http:
        return b"\x00\x00\x00\x01" in heard[9:] and len(heard) > 30  # a frame of the call, or GOAWAY
    head, found, body = heard.partition(b"\r\n\r\n")
    if not found:
        return False
    length = _LENGTH.search(head + b"\r\n")
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")
