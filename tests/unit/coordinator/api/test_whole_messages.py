"""What a client sends over gRPC is held within the budget, whether it comes at once, slowly or never."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, cast

import grpc
import pytest

from coordinator.admission.byte_budget import UNCOUNTED, ByteBudget
from coordinator.api.whole_messages import WholeMessages
from outrider.base.aio import until
from outrider.protocol.errors import Expired, InvalidRequest, Overloaded
from outrider.security.error_interceptor import ErrorInterceptor
from outrider.v1 import coordinator_pb2 as pb

MIB = 1024 * 1024
LARGEST = 4 * MIB
GENERATE = "/outrider.v1.Outrider/Generate"
ATTACHING = "outrider.v1.Attachment"
HEALTH = "/grpc.health.v1.Health/Check"
TIMEOUT_S = 3.0
Read = Callable[[AsyncIterator[pb.GenerateRequest]], AsyncIterator[pb.GenerateReply]]


class Details(NamedTuple):
    method: str


class Call:
    """Context of a call that sends these messages."""

    def __init__(self, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        self._requests = requests

    async def read(self) -> Any:
        return await anext(self._requests, grpc.aio.EOF)


class Handler:
    """Answers a request when it is told to."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.answer = asyncio.Event()

    async def __call__(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        self.requests.append(request)
        await self.answer.wait()
        yield pb.GenerateReply()
        await asyncio.Event().wait()


async def reading(handler: Handler, budget: ByteBudget, method: str = GENERATE) -> Read:
    """Return what answers a stream of requests to a method that takes one."""

    async def generate(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        async with contextlib.aclosing(handler(request, context)) as replies:
            async for reply in replies:
                yield reply

    async def continuation(_: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(generate)

    whole = WholeMessages(budget, LARGEST, TIMEOUT_S, "outrider.v1.Registry", first=ATTACHING)
    made = await whole.intercept_service(
        cast(Callable[[Any], Awaitable[Any]], continuation), cast(Any, Details(method))
    )
    return lambda requests: made.stream_stream(requests, Call(requests))


async def sending(size: int) -> AsyncIterator[pb.GenerateRequest]:
    yield pb.GenerateRequest(prompt="x" * size)


async def held_back() -> AsyncIterator[pb.GenerateRequest]:
    await asyncio.Event().wait()
    yield pb.GenerateRequest()


async def test_small_requests_are_read_whatever_is_held() -> None:
    budget = ByteBudget(MIB)
    handler = Handler()
    handler.answer.set()
    read = await reading(handler, budget)
    with budget.share() as share:
        budget.take(share, MIB + UNCOUNTED)
        async with contextlib.aclosing(read(sending(1000))) as replies:
            assert await anext(replies) is not None
    assert len(handler.requests[0].prompt) == 1000


async def test_requests_that_are_held_back_count_as_the_largest_until_they_are_there() -> None:
    budget = ByteBudget(2 * LARGEST)
    read = await reading(Handler(), budget)
    first, second = (asyncio.ensure_future(anext(read(held_back()))) for _ in range(2))
    assert await until(lambda: budget._held == 2 * (LARGEST - UNCOUNTED), 5)
    with pytest.raises(Overloaded, match="being read already"):
        await anext(read(held_back()))
    for late in (first, second):
        with pytest.raises(Expired):
            await late
    assert budget._held == 0


async def test_a_late_message_counts_as_large_as_it_is_once_it_is_there() -> None:
    budget, handler, sent = ByteBudget(2 * LARGEST), Handler(), asyncio.Event()

    async def late() -> AsyncIterator[pb.GenerateRequest]:
        await sent.wait()
        yield pb.GenerateRequest(prompt="x" * MIB)

    answering = asyncio.ensure_future(anext((await reading(handler, budget))(late())))
    assert await until(lambda: budget._held == LARGEST - UNCOUNTED, 5)
    sent.set()
    assert await until(lambda: bool(handler.requests), 5)
    assert budget._held == handler.requests[0].ByteSize() - UNCOUNTED
    handler.answer.set()
    await answering
    assert budget._held == 0


async def test_a_large_request_counts_until_it_is_answered() -> None:
    budget = ByteBudget(3 * MIB)
    handler = Handler()
    read = await reading(handler, budget)
    replies = read(sending(2 * MIB))
    answering = asyncio.ensure_future(anext(replies))
    assert await until(lambda: bool(handler.requests), 5)
    with pytest.raises(Overloaded):
        await anext(read(sending(2 * MIB)))
    handler.answer.set()
    await answering
    assert budget._held == 0, "it has become a session"
    assert await anext(read(sending(2 * MIB))) is not None
    await replies.aclose()


async def test_a_caller_who_leaves_gives_its_share_back() -> None:
    budget = ByteBudget(LARGEST)
    read = await reading(Handler(), budget)
    waiting = asyncio.ensure_future(anext(read(held_back())))
    assert await until(lambda: budget._held > 0, 5)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert budget._held == 0


async def test_strangers_have_no_room_in_the_budget() -> None:
    """Health is open to all."""
    budget = ByteBudget(LARGEST)
    read = await reading(Handler(), budget, HEALTH)
    waiting = asyncio.ensure_future(anext(read(held_back())))
    while not waiting.done():
        assert budget._held == 0
        await asyncio.sleep(0.01)
    with pytest.raises(Expired):
        waiting.result()


async def test_a_call_without_a_message_is_refused() -> None:
    async def nothing() -> AsyncIterator[pb.GenerateRequest]:
        return
        yield

    read = await reading(Handler(), ByteBudget(MIB))
    with pytest.raises(InvalidRequest, match="before its message"):
        await anext(read(nothing()))


async def test_a_long_stream_is_controlled_until_its_first_message() -> None:
    """An engine attaches and is silent for as long as its requests wait."""
    budget, taken = ByteBudget(LARGEST), asyncio.Event()

    async def attach(requests: AsyncIterator[pb.GenerateRequest], context: Any) -> AsyncIterator[pb.GenerateReply]:
        async for _ in requests:
            taken.set()
            yield pb.GenerateReply()

    async def continuation(_: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(attach)

    async def silent_after_the_first() -> AsyncIterator[pb.GenerateRequest]:
        yield pb.GenerateRequest()
        await asyncio.sleep(2 * TIMEOUT_S)
        yield pb.GenerateRequest()

    whole = WholeMessages(budget, LARGEST, TIMEOUT_S, "outrider.v1.Registry", first=ATTACHING)
    details = cast(Any, Details(f"/{ATTACHING}/Attach"))
    made = await whole.intercept_service(cast(Callable[[Any], Awaitable[Any]], continuation), details)
    late = asyncio.ensure_future(anext(made.stream_stream(None, Call(held_back()))))
    assert await until(lambda: budget._held > 0, 5)
    with pytest.raises(Overloaded):
        await anext(made.stream_stream(None, Call(held_back())))
    with pytest.raises(Expired):
        await late
    assert len([reply async for reply in made.stream_stream(None, Call(silent_after_the_first()))]) == 2


class Large:
    """In the place of a large request."""

    DESCRIPTOR = pb.GetServerInfoRequest.DESCRIPTOR

    def ByteSize(self) -> int:  # as of a message
        return MIB


@pytest.mark.parametrize("ended", ["answered", "refused"])
async def test_a_message_does_not_wait_for_the_collector_of_garbage(ended: str) -> None:
    """It runs rarely, so that a few dozen large requests took gigabytes."""
    held: list[weakref.ref[Large]] = []

    def decode(_: bytes) -> Large:
        held.append(weakref.ref(large := Large()))
        if ended == "refused":
            raise InvalidRequest("it has too many messages")
        return large

    async def generate(request: Large, context: Any) -> AsyncIterator[bytes]:
        yield b""

    handler = grpc.method_handlers_generic_handler(
        "outrider.v1.Outrider", {"Generate": grpc.unary_stream_rpc_method_handler(generate, decode, bytes)}
    )
    whole = WholeMessages(ByteBudget(2 * MIB), LARGEST, TIMEOUT_S, "outrider.v1.Registry", first=ATTACHING)
    server = grpc.aio.server(interceptors=[ErrorInterceptor(5.0), whole])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.disable()
    try:
        opened: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        async with opened as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [reply async for reply in channel.unary_stream(GENERATE)(b"")] == [b""]
                assert ended == "answered"
        await server.stop(1.0)
        assert len(held) == 1
        assert held[0]() is None
    finally:
        gc.enable()
