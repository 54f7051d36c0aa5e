"""An engine with clients of its own takes guesses for its requests; here the engine is a test that knows its text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog

from coordinator.api.service import CoordinatorService
from coordinator.attachment.session import METRICS_NAME
from outrider.base.aio import until as soon
from outrider.base.grpc_options import channel_options
from outrider.engine.vllm.attached.client import AttachmentClient
from outrider.engine.vllm.attached.options import AttachOptions
from outrider.engine.vllm.attached.request import AttachedRequest
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import (
    MAX_GAMMA,
    TokenKind,
    Verdict,
    VerifySteering,
    VerifyTimings,
)
from outrider.settings.coordinator import CoordinatorSettings
from outrider.speculation.tree import GuessTree, tallies
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Redis, in_process
from tests.contract.conftest import HEARTBEAT_MS, House, drafter_serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = ModelInfo("engine", "engine", vocab_size=1000, vocabulary_digest="digest")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4
STEP_S = 0.004
SOON_S = 10.0
NO_REDIS = "redis://127.0.0.1:1"


def text(position: int) -> int:
    return 1 + position % 8


def opening(model: ModelInfo = MODEL, max_guesses: int = 6, **params: Any) -> pb.AttachRequest:
    given = {"temperature": 0.0, "seed": 1, "max_tokens": 500, "ignore_eos": True} | params
    return pb.AttachRequest(
        open=pb.OpenAttached(
            tokens=PROMPT,
            prompt_length=len(PROMPT),
            params=common.SamplingParams(**given),
            model=convert.model_to_proto(model),
            max_guesses=max_guesses,
        )
    )


class Engine:
    """A request of an engine that verifies what has come by the time of each step."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.committed = list(PROMPT)
        self.tree = GuessTree(self.committed, single=False)
        self.steering = VerifySteering()
        self.proposed = self.accepted = 0

    async def receive(self) -> None:
        async for message in self.call:
            if message.WhichOneof("message") == "guess":
                assert len(message.guess.parents) == 0, "chains only"
                self.tree.add(convert.guess_from_proto(message.guess))
            else:
                self.steering = convert.verify_steering_from_proto(message.steer)

    async def step(self) -> None:
        await asyncio.sleep(STEP_S)
        position = len(self.committed)
        block = self.tree.block(6, MAX_GAMMA, chain=True)
        accepted = 0
        while accepted < len(block.tokens) and block.tokens[accepted] == text(position + accepted):
            accepted += 1
        proposed = len(block.tokens)
        last = TokenKind.PLAIN if not proposed else TokenKind.BONUS if accepted == proposed else TokenKind.RECOVERED
        tokens = tuple(text(position + i) for i in range(accepted + 1))
        timings = VerifyTimings(step_us=int(STEP_S * 1e6), batch_tokens=1 + proposed, session_tokens=1 + proposed)
        depths = range(1, proposed + 1)
        sources = tallies(self.tree.nodes(block), depths, range(1, accepted + 1))
        self.committed += tokens
        self.tree.commit(tokens)
        self.proposed += proposed
        self.accepted += accepted
        verdict = Verdict(position, tokens, accepted, last, proposed, timings=timings, sources=sources, nodes=proposed)
        reply = verify.VerifyReply(verdict=convert.verdict_to_proto(verdict))
        reply.verdict.remaining_depth = self.tree.depth
        await self.call.write(pb.AttachRequest(reply=reply))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """A coordinator with a drafter and no verifier, around a Redis of its own."""
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=HEARTBEAT_MS)
    redis = Redis(tmp_path_factory.mktemp("redis"))
    redis.start()
    redis.wait_ready(10)
    service = CoordinatorService(settings, redis.url)
    async with AsyncExitStack() as stack:
        stack.callback(redis.stop)
        address = await stack.enter_async_context(in_process(service, settings))
        await stack.enter_async_context(drafter_serving(kind="suffix", coordinators=address))
        assert await soon(lambda: len(service.sessions.worker_pool.connections()) == 1, 20)
        yield address, service


def attach(channel: grpc.aio.Channel) -> Any:
    return rpc.AttachmentStub(channel).Attach(timeout=30)  # type: ignore[call-arg]


async def refusal(address: str, *requests: pb.AttachRequest) -> str:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = attach(channel)
        for request in requests:
            await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in call:
                pass
        return str(error.value.details())


async def test_an_engine_gets_guesses_that_hold(alone: tuple[str, CoordinatorService]) -> None:
    address, service = alone
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        engine = Engine(call := attach(channel))
        await call.write(opening(max_tokens=5000))
        receiving = asyncio.create_task(engine.receive())
        while not engine.proposed:  # the drafter joins meanwhile
            await engine.step()
        for _ in range(30):
            assert await soon(lambda: engine.tree.depth > 0, SOON_S), "a guess for each step"
            await engine.step()
        await call.done_writing()
        await receiving
        assert await call.code() is grpc.StatusCode.OK
    assert engine.committed == [text(position) for position in range(len(engine.committed))]
    assert engine.accepted > 60, "several tokens a step"
    assert engine.accepted > 0.8 * engine.proposed
    metrics = service.sessions.metrics.render()[0].decode()
    assert f'request_success_total{{finished_reason="stop",model_name="{METRICS_NAME}"}} 1.0' in metrics


async def test_another_vocabulary_is_refused(house: House) -> None:
    assert "vocabulary is not that of" in await refusal(house.coordinator, opening())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.AttachRequest(reply=verify.VerifyReply()), "must be open"),
        (opening(ModelInfo("engine", "engine", vocab_size=1000)), "the digest of the vocabulary"),
        (opening(ModelInfo("engine", "engine", vocab_size=3, vocabulary_digest="d")), "open.tokens"),
        (opening(max_guesses=0), "open.max_guesses"),
        (opening(temperature=1.0, verification=common.VERIFICATION_BLOCK), "greedy or coupled"),
        (opening(logprobs=1), "greedy or coupled"),
        (opening(max_tokens=0), "max_tokens"),
    ],
)
async def test_an_opening_that_cannot_be_served_is_refused(
    alone: tuple[str, CoordinatorService], request_: pb.AttachRequest, reason: str
) -> None:
    assert reason in await refusal(alone[0], request_)


async def test_a_verdict_that_contradicts_the_session_ends_it(alone: tuple[str, CoordinatorService]) -> None:
    verdict = convert.verdict_to_proto(Verdict(len(PROMPT) + 1, (1,), 0, TokenKind.PLAIN))
    lie = pb.AttachRequest(reply=verify.VerifyReply(verdict=verdict))
    assert "verdict.position" in await refusal(alone[0], opening(), lie)


async def test_attached_requests_count_among_the_sessions(alone: tuple[str, CoordinatorService]) -> None:
    address, service = alone
    others = [""] * service._settings.max_sessions
    service.sessions.attached.extend(others)
    try:
        assert "sessions are running" in await refusal(address, opening())
    finally:
        del service.sessions.attached[: len(others)]
    assert service.sessions.attached == [], "ended ones do not count"


async def test_a_coordinator_that_stops_sends_engines_elsewhere() -> None:
    settings = CoordinatorSettings(http_port=-1)
    service = CoordinatorService(settings, NO_REDIS)
    async with (
        in_process(service, settings) as address,
        grpc.aio.insecure_channel(address, options=channel_options()) as channel,
    ):
        await (call := attach(channel)).write(opening())
        assert (await call.read()).HasField("steer")
        service.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="attach to another"):
            await call.read()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in await refusal(address, opening())


async def test_an_engine_that_refuses_guesses_costs_no_other_session_its_drafter(
    alone: tuple[str, CoordinatorService],
) -> None:
    """It is not trusted: what it says of a drafter, no verifier has seen."""
    address, service = alone
    (drafter,) = service.sessions.worker_pool.connections()
    wrong = convert.error_to_proto(InvalidRequest("wrong", field="guess.tokens"))
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        engine = Engine(call := attach(channel))
        await call.write(opening(max_tokens=5000))
        receiving = asyncio.create_task(engine.receive())
        while not engine.proposed:
            await engine.step()
        await call.write(pb.AttachRequest(reply=verify.VerifyReply(refused=wrong, source=1)))
        assert await soon(lambda: not drafter.streams, SOON_S), "the session has lost it"
        assert service.sessions.worker_pool.usable(drafter)
        assert not sum(service.sessions.worker_pool.shunned.violations.values())
        await call.done_writing()
        await receiving


@pytest.mark.parametrize("lost_before", ["", "127.0.0.1:1,"], ids=["at once", "after another coordinator was lost"])
async def test_a_request_that_found_no_place_is_attached_when_there_is_one(
    alone: tuple[str, CoordinatorService], lost_before: str
) -> None:
    """The client inside vLLM, on the loop of its own thread; the engine's requests last for minutes."""
    address, service = alone
    others = [""] * service._settings.max_sessions
    service.sessions.attached.extend(others)
    client = AttachmentClient(AttachOptions(coordinators=lost_before + address), MODEL, 6, threading.Event())
    request = AttachedRequest("a", list(PROMPT), len(PROMPT), SamplingParams(0.0, seed=1), MODEL.vocab_size)
    try:
        client.open(request, PROMPT, "")
        assert await soon(lambda: any("sessions" in told for told in client._told), SOON_S), "refused, and told so"
        del service.sessions.attached[:]
        assert await soon(lambda: len(service.sessions.attached) == 1, SOON_S)
        client.send([(request, 0, None)])
        assert await soon(lambda: not service.sessions.attached, SOON_S)
        assert await soon(lambda: not client._tasks, SOON_S)
    finally:
        del service.sessions.attached[:]
        client._loop.call_soon_threadsafe(client._loop.stop)


async def test_a_guess_with_fewer_distributions_than_tokens_is_refused_inside_vllm() -> None:
    """The scheduler's thread reads it: any other error than a refusal ends the engine, with the requests of all."""
    request = AttachedRequest("a", list(PROMPT), len(PROMPT), SamplingParams(0.0, seed=1), MODEL.vocab_size)
    one = common.Distribution(id_deltas=[5], weights=[1 << 16])
    guess = common.Guess(position=len(PROMPT), first_id=1, tokens=[5, 6], draft_probs=[one], source=3)
    for message in (1, verify.VerifyRequest(guess=guess)):
        request.receive(message, threading.Event())
    request.read()
    (refusal,) = request.refusals
    assert (refusal.refused.field, refusal.source) == ("guess.draft_probs", 3)


async def test_a_coordinator_that_sends_what_is_no_message_is_left_for_the_next() -> None:
    async def attach_badly(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"\xff\xff\xff"
        async for _ in requests:
            pass

    server = grpc.aio.server()
    methods = {"Attach": grpc.stream_stream_rpc_method_handler(attach_badly)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.Attachment", methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = AttachmentClient(AttachOptions(coordinators=address), MODEL, 6, threading.Event())
    try:
        client.open(AttachedRequest("a", list(PROMPT), len(PROMPT), SamplingParams(0.0, seed=1), 1000), PROMPT, "")
        assert await soon(lambda: client._turn > 0, SOON_S)
        assert client._tasks, "the request is attached when there is a coordinator"
    finally:
        client._loop.call_soon_threadsafe(client._loop.stop)
        await server.stop(None)


async def test_each_of_the_coordinators_that_are_lost_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be without them for days, and each request tries again."""
    for name in ("_RETRY_S", "_MAX_RETRY_S"):
        monkeypatch.setattr(f"outrider.engine.vllm.attached.client.{name}", 0.01)
    request = AttachedRequest("a", list(PROMPT), len(PROMPT), SamplingParams(0.0, seed=1), MODEL.vocab_size)
    with structlog.testing.capture_logs() as lines:
        options = AttachOptions(coordinators="127.0.0.1:1,127.0.0.1:2")
        client = AttachmentClient(options, MODEL, 6, threading.Event())
        client.open(request, PROMPT, "")
        assert await soon(lambda: client._turn > 6, SOON_S)
        client.send([(request, 0, None)])
        assert await soon(lambda: not client._tasks, SOON_S)
        client._loop.call_soon_threadsafe(client._loop.stop)
    assert [line["event"].partition(",")[0] for line in lines] == ["coordinator lost"] * 2
