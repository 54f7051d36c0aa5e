"""A verifier that lies, beside an honest one: its sessions move to the other, and their text is the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from coordinator.api.service import CoordinatorService
from coordinator.sessions.streams import PLAIN_STEPS
from coordinator.workers.shunned import ShunnedWorkers
from outrider.base.aio import until as soon
from outrider.base.grpc_options import channel_options
from outrider.engine.loading.loader import LoadedModel
from outrider.multiplex.frames import PART_BYTES, WINDOW_BYTES
from outrider.protocol import convert
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc as rpc
from outrider.v1 import multiplex_pb2 as multiplex
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Output, Redis, ask, client, generate, in_process
from tests.contract.conftest import HEARTBEAT_MS, verifier_serving

LENGTH = 12
PROMPT = "Whom should one believe? "
Reply = Callable[[int], bytes]


def verdict(position: int, **fields: Any) -> bytes:
    plain: dict[str, Any] = {"position": position, "tokens": [7], "last": TokenKind.PLAIN}
    return verify.VerifyReply(verdict=verify.Verdict(**(plain | fields))).SerializeToString()


MANNERS: dict[str, Reply] = {
    "accepts without end": lambda at: verdict(at, accepted=2**31),
    "checks without end": lambda at: verdict(at, proposed=2**31, nodes=2**31),
    "a million tokens": lambda at: verdict(at, tokens=[7] * 1_000_000),
    "more plain steps than asked for": lambda at: verdict(at, tokens=[7] * (PLAIN_STEPS + 1)),
    "ids that there are not": lambda at: verdict(at, tokens=[2**31]),
    "elsewhere": lambda at: verdict(at + 1),
    "no kind that there is": lambda at: verdict(at, last=99),
    "no reason that there is": lambda at: verdict(at, finish_reason=99),
    "over at once": lambda at: verdict(at, finish_reason=FinishReason.LENGTH),
    "a stop that is none": lambda at: verdict(at, finish_reason=FinishReason.STOP),
    "tallies of nobody": lambda at: verdict(at, sources=[verify.SourceTally(source=9, accepted=2**31)]),
    "hidden states": lambda at: verdict(at, hidden_states=common.HiddenStates(position=at, width=0, rows=b"x" * 4096)),
    "logprobs": lambda at: verdict(at, logprobs=[verify.TokenLogprobs(logprob=float("nan"))]),
    "refuses what nobody sent": lambda _: verify.VerifyReply(
        refused=common.Error(code="internal"), source=3
    ).SerializeToString(),
    "opens again": lambda at: verify.VerifyReply(opened=verify.Opened(position=at)).SerializeToString(),
    "nothing": lambda _: b"",
    "bytes": lambda _: b"\xff\xff\xff",
}


def frames(stream: int, at: int, *said: bytes) -> multiplex.SessionFrames:
    """The messages of one session on the shared stream, in parts."""
    parts = [
        (data[start : start + PART_BYTES], start + PART_BYTES < len(data))
        for data in said
        for start in range(0, max(1, len(data)), PART_BYTES)
    ]
    return multiplex.SessionFrames(
        frames=[multiplex.SessionFrame(stream=stream, payload=part, more=more) for part, more in parts]
    )


def frame(**fields: Any) -> multiplex.SessionFrames:
    return multiplex.SessionFrames(frames=[multiplex.SessionFrame(**fields)])


# What it sends on the shared stream to the session that it was given.
SHARED: dict[str, Callable[[int, int], list[multiplex.SessionFrames]]] = {
    "an unknown stream": lambda stream, at: [frame(stream=stream + 1000, payload=verdict(at))],
    "stream 0": lambda stream, at: [frame(stream=0, payload=b"x")],
    "opens streams": lambda stream, at: [frame(stream=stream, open=multiplex.OpenStream())],
    "an empty batch": lambda stream, at: [multiplex.SessionFrames()],
    "an empty ping": lambda stream, at: [multiplex.SessionFrames(ping=True)],
    "a pong that nobody asked for": lambda stream, at: [multiplex.SessionFrames(pong=True)],
    "an empty frame": lambda stream, at: [frame(stream=stream)],
    "a batch too large": lambda stream, at: [multiplex.SessionFrames(frames=[multiplex.SessionFrame()] * 100_000)],
    "a part too large": lambda stream, at: [frame(stream=stream, payload=b"x" * (PART_BYTES + 1))],
    "credit for nothing": lambda stream, at: [frame(stream=stream, credit=2**31)],
    "no status that there is": lambda stream, at: [frame(stream=stream, end=multiplex.StreamEnd(status=99))],
    "speaks after its end": lambda stream, at: [frame(stream=stream, end=multiplex.StreamEnd())] * 2,
    "beyond its window": lambda stream, at: [frame(stream=stream, payload=b"x" * PART_BYTES, more=True)] * 4096,
    "elsewhere, shared": lambda stream, at: [frames(stream, at, MANNERS["elsewhere"](at))],
    "a million tokens, shared": lambda stream, at: [
        multiplex.SessionFrames(frames=[each]) for each in frames(stream, at, MANNERS["a million tokens"](at)).frames
    ],
    "bytes, shared": lambda stream, at: [frames(stream, at, b"\xff\xff\xff")],
}


class Hostile:
    """A verifier of the target, as far as its word goes."""

    def __init__(self, model: common.ModelInfo) -> None:
        self.model = model
        self.manner = ""
        self.opened = 0
        self.shared = asyncio.Event()  # a shared stream is open
        self.probe = common.ProbeReply()

    async def verify(self, requests: AsyncIterator[verify.VerifyRequest], context: Any) -> AsyncIterator[bytes]:
        opening = (await anext(requests)).open
        self.opened += 1
        at = len(opening.tokens)
        if self.manner == "cannot":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no", ((convert.ERROR_KEY, b"\xff\xff"),))
        wrong = common.ModelInfo(fingerprint="another")
        opened = verify.Opened(position=at, model=wrong if self.manner == "another target" else self.model)
        yield verify.VerifyReply(opened=opened).SerializeToString()
        if self.manner in MANNERS:
            yield MANNERS[self.manner](at)
        await asyncio.sleep(3600)

    async def sessions(
        self, batches: AsyncIterator[multiplex.SessionFrames], context: Any
    ) -> AsyncIterator[multiplex.SessionFrames]:
        if self.manner not in SHARED:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older verifier")
        yield multiplex.SessionFrames(window=WINDOW_BYTES)
        self.shared.set()
        async for batch in batches:
            for each in batch.frames:
                opening = verify.VerifyRequest.FromString(each.payload).open
                if not opening.tokens:
                    continue
                self.opened += 1
                at = len(opening.tokens)
                opened = verify.VerifyReply(opened=verify.Opened(position=at, model=self.model)).SerializeToString()
                yield frames(each.stream, at, opened)
                for said in SHARED[self.manner](each.stream, at):
                    yield said

    async def answer(self, request: common.ProbeRequest, context: Any) -> common.ProbeReply:
        return self.probe

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "outrider.v1.Verifier",
            {
                "Verify": grpc.stream_stream_rpc_method_handler(self.verify, verify.VerifyRequest.FromString, bytes),
                "Sessions": grpc.stream_stream_rpc_method_handler(
                    self.sessions, multiplex.SessionFrames.FromString, multiplex.SessionFrames.SerializeToString
                ),
                "Probe": grpc.unary_unary_rpc_method_handler(
                    self.answer, common.ProbeRequest.FromString, common.ProbeReply.SerializeToString
                ),
            },
        )


class Pair:
    """An honest verifier that others' sessions fill up first, and one that is not."""

    def __init__(self, coordinator: str, service: CoordinatorService, hostile: Hostile) -> None:
        self.coordinator = coordinator
        self.service = service
        self.hostile = hostile

    @asynccontextmanager
    async def with_hostile(self, manner: str) -> AsyncIterator[None]:
        """Registered under a name and an address that nothing is known of.

        The system may choose a port again that a verifier before this one had. Its shunning, which is for an address
        too, would then leave this one out for 5 or 20 s.
        """
        self.service.sessions.worker_pool.shunned = ShunnedWorkers()
        self.hostile.manner = manner
        self.hostile.opened = 0
        self.hostile.shared.clear()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self.hostile.handlers(),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        worker = pb.Worker(
            worker_id=f"hostile at {address}",
            role=pb.ROLE_VERIFIER,
            address=address,
            kind="target",
            capacity=10**6,
            model=self.hostile.model,
        )
        worker_pool = self.service.sessions.worker_pool
        async with grpc.aio.insecure_channel(self.coordinator, options=channel_options()) as channel:
            call = rpc.RegistryStub(channel).Register()
            await call.write(pb.RegisterRequest(worker=worker))
            await call.read()
            if manner in SHARED:
                await asyncio.wait_for(self.hostile.shared.wait(), 10)
            yield
            call.cancel()
            assert await soon(lambda: all(link.info.address != address for link in worker_pool.connections()), 20)
        await server.stop(0)

    async def answer(self, seed: int = 1, **params: Any) -> Output:
        async with client(self.coordinator) as stub:
            return await generate(stub, ask(PROMPT, max_tokens=LENGTH, ignore_eos=True, seed=seed, **params))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    loaded: LoadedModel, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    settings = CoordinatorSettings(http_port=0, heartbeat_ms=HEARTBEAT_MS, worker_wait_s=10, verdict_timeout_s=1.0)
    service = CoordinatorService(settings, redis_server.url)
    folder = tmp_path_factory.mktemp("tokenizer")
    async with (
        in_process(service, settings) as coordinator,
        verifier_serving(loaded, folder, coordinators=coordinator, max_sessions=4),
    ):
        assert await soon(service.ready, 20)
        yield Pair(coordinator, service, Hostile(convert.model_to_proto(loaded.engine.info)))


async def until_it_had_one(pair: Pair) -> list[Output]:
    """Sessions until the other verifier was given one: it says that it has endless room, so that is soon."""
    outputs = []
    for _ in range(40):
        outputs += await asyncio.gather(*(pair.answer() for _ in range(2)))
        if pair.hostile.opened:
            return outputs
    raise AssertionError("nobody believed that it has room")


@pytest.mark.parametrize("manner", [*MANNERS, *SHARED, "another target", "cannot", "silent"])
async def test_a_verifier_that_lies_loses_the_session_and_the_text_is_the_same(pair: Pair, manner: str) -> None:
    honest = await pair.answer()
    async with pair.with_hostile(manner):
        outputs = await until_it_had_one(pair)
        shunned = [
            link
            for link in pair.service.sessions.worker_pool.connections()
            if not pair.service.sessions.worker_pool.usable(link)
        ]
    assert [output.token_ids for output in outputs] == [honest.token_ids] * len(outputs)
    assert sum(output.stats.failovers for output in outputs) >= 1
    if manner in MANNERS or manner in SHARED or manner == "another target":
        assert [link.info.address for link in shunned if "hostile" in link.info.worker_id], "left alone for a while"


async def test_a_load_that_cannot_be_ends_no_probe(pair: Pair) -> None:
    pair.hostile.probe = common.ProbeReply(
        load=common.WorkerLoad(
            sessions=2**32 - 1,
            step_ms=float("nan"),
            cost=common.CostCurve(rows=range(1, 100_001), ms=[float("inf")] * 100_000),
        )
    )
    async with pair.with_hostile("silent"):
        output = await pair.answer()
        links = pair.service.sessions.worker_pool.connections()
        lying = next(link for link in links if "hostile" in link.info.worker_id)
        assert await soon(lambda: lying.info.load.sessions == 2**32 - 1, 5)
        assert not lying.info.load.cost.rows
    pair.hostile.probe = common.ProbeReply()
    assert output.finished
