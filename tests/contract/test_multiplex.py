"""Sessions that share one stream to a worker: what each of them sees is what a call of its own would show it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from coordinator.workers.worker_connection import worker_error
from outrider.base.aio import until as soon
from outrider.base.grpc_options import channel_options
from outrider.engine.loading.loader import LoadedModel
from outrider.multiplex import client
from outrider.multiplex.calls import MultiplexedCall, SessionCall
from outrider.multiplex.client import WorkerCalls
from outrider.multiplex.frames import MAX_BATCH_BYTES, MESSAGE_COST, PART_BYTES, WINDOW_BYTES
from outrider.protocol.errors import Fenced, InvalidRequest, PeerLost
from outrider.protocol.speculation import VerifySteering
from outrider.security.api_keys import ApiKeys
from outrider.security.channels import Channels
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import multiplex_pb2 as pb
from outrider.v1 import verifier_pb2 as verify
from outrider.v1 import verifier_pb2_grpc as verifier_rpc
from tests.cluster import in_process, verifier_load
from tests.contract.conftest import Verify, drafter_serving, opening, verifier_serving, verifying
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService
from verifier.session import VerifySession

pytestmark = pytest.mark.timeout(60)


class Typed:
    """The call of one session, with messages in place of bytes."""

    def __init__(self, call: SessionCall, decode: Any) -> None:
        self.raw = call
        self._decode = decode

    async def write(self, message: Any) -> None:
        assert self.raw.send(message.SerializeToString())

    async def read(self) -> Any:
        data = await self.raw.read()
        return grpc.aio.EOF if data is None else self._decode(data)

    def cancel(self) -> None:
        self.raw.cancel()


class Shared:
    """A shared stream to a worker, from a coordinator's side."""

    def __init__(self, channel: grpc.aio.Channel, service: str, decode: Any) -> None:
        self._channel = channel
        self._decode = decode
        self.calls = WorkerCalls(f"outrider.v1.{service}", "none", 32 * 2**20)

    async def start(self, *metadata: tuple[str, str]) -> Typed:
        self.calls.keep_open(self._channel)
        assert await soon(lambda: self.calls.shared is not None, 10)
        return Typed(self.calls.start(self._channel, metadata), self._decode)

    async def verify(self, *metadata: tuple[str, str]) -> Verify:
        return Verify(await self.start(*metadata))

    @property
    def num_open(self) -> int:
        return 0 if self.calls.shared is None else len(self.calls.shared.streams)


@asynccontextmanager
async def sharing(address: str, key: str = "") -> AsyncIterator[Shared]:
    channel = Channels(key=key).aio_channel(address)
    shared = Shared(channel, "Verifier", verify.VerifyReply.FromString)
    try:
        yield shared
    finally:
        await shared.calls.close()
        await channel.close()


async def read_all(stream: Verify) -> list[int]:
    while not stream.over:
        await stream.verdict()
    stream.call.cancel()
    return stream.tokens


async def test_sessions_of_one_stream_get_what_calls_of_their_own_get(verifier: str, prompt: list[int]) -> None:
    params = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 9, "logprobs": 3}]
    alone = []
    for number, fields in enumerate(params):
        async with verifying(verifier) as stream:
            await stream.open(prompt, session_id=f"own {number}", max_tokens=24, **fields)
            await stream.rest()
            alone.append(stream.tokens)
    async with sharing(verifier) as shared:
        streams = [await shared.verify() for _ in params]
        for number, (stream, fields) in enumerate(zip(streams, params, strict=True)):
            opened = await stream.open(prompt, session_id=f"shared {number}", max_tokens=24, **fields)
            assert opened.position == len(prompt)
        assert await asyncio.gather(*map(read_all, streams)) == alone
        assert await soon(lambda: shared.num_open == 0, 5), "both sides have ended every stream"
    assert await soon_free(verifier)


async def test_guesses_and_refusals_belong_to_their_session(verifier: str, prompt: list[int], greedy: Any) -> None:
    wanted = greedy(prompt, 12)
    async with sharing(verifier) as shared:
        good, bad = await shared.verify(), await shared.verify()
        for name, stream in (("good", good), ("bad", bad)):
            await stream.open(prompt, session_id=name, max_tokens=12, gamma=4, draft_wait_us=2_000_000)
        await bad.guess(10**6, [1])
        assert (await bad.refused()).field == "guess.position"
        at = (await good.verdict()).position + 1
        await good.guess(at, wanted[at - len(prompt) :][:4])
        assert (await good.verdict()).accepted == 4
        for stream in (good, bad):
            await stream.steer(gamma=0)
        assert await read_all(good) == wanted
        assert await read_all(bad) == wanted


async def test_an_error_ends_its_own_session_only(verifier: str, prompt: list[int], greedy: Any) -> None:
    async with sharing(verifier) as shared:
        good, bad, silent = [await shared.verify() for _ in range(3)]
        await good.open(prompt, session_id="good", max_tokens=200, gamma=4, draft_wait_us=100_000)
        await bad.send_open([*prompt, 10**6], session_id="bad")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad.call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = worker_error(verifier, caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == "open.tokens[" + str(len(prompt)) + "]"
        with pytest.raises(grpc.aio.AioRpcError, match="no message on the stream"):
            await silent.call.read()
        undecodable = await shared.start()
        undecodable.raw.send(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="no valid message"):
            await undecodable.read()
        await good.steer(gamma=0)
        assert await read_all(good) == greedy(prompt, 200)


@pytest.mark.parametrize("own", [False, True], ids=["in the shared stream", "a call of its own"])
async def test_an_error_that_nobody_expects_ends_its_own_session_only(
    verifier: str, prompt: list[int], greedy: Any, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Its session got no verdicts any more, and no error, as long as the stream lasted."""
    steer = VerifySession.steer

    def failing(session: VerifySession, steering: VerifySteering) -> None:
        if session.id == "bad" and steering.gamma == 7:
            raise KeyError("what no check has thought of")
        steer(session, steering)

    monkeypatch.setattr(VerifySession, "steer", failing)
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(sharing(verifier))
        good, bad = [await shared.verify() for _ in range(2)]
        if own:
            bad = await stack.enter_async_context(verifying(verifier))
        for name, stream in (("good", good), ("bad", bad)):
            await stream.open(prompt, session_id=name, max_tokens=200, gamma=4, draft_wait_us=400_000)
        with capture_logs() as lines:
            await bad.steer(gamma=7)
            with pytest.raises(grpc.aio.AioRpcError, match="internal error: KeyError") as caught:
                async with asyncio.timeout(20):
                    await bad.rest()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert [line["log_level"] for line in lines if line["event"] == "request failed"] == ["error"]
        await good.steer(gamma=0)
        assert await read_all(good) == greedy(prompt, 200)
    assert await soon_free(verifier)


async def test_a_message_that_is_too_large_is_no_failure_here(verifier: str, prompt: list[int]) -> None:
    async with sharing(verifier) as shared:
        stream = await shared.verify()
        await stream.open(prompt, session_id="large", max_tokens=200, gamma=4, draft_wait_us=400_000)
        with capture_logs() as lines:
            stream.call.raw.send(bytes(33 * 2**20))
            with pytest.raises(grpc.aio.AioRpcError, match="message larger than max"):
                await stream.rest()
            assert await soon_free(verifier)
    assert not [line for line in lines if line["log_level"] == "error"]


async def test_a_higher_epoch_takes_over_across_streams(verifier: str, prompt: list[int]) -> None:
    async with sharing(verifier) as one, sharing(verifier) as other:
        old, new = await one.verify(), await other.verify()
        await old.open(prompt, session_id="moved", max_tokens=300, gamma=4, draft_wait_us=50_000)
        await new.open(prompt, session_id="moved", epoch=2, max_tokens=8)
        assert isinstance(worker_error(verifier, await failure_of(old)), Fenced)
        assert len(await read_all(new)) == 8


async def test_sessions_beyond_the_limit_that_come_at_once_stop_no_other(
    loaded: LoadedModel, tmp_path: Path, prompt: list[int], greedy: Any
) -> None:
    """As of a verifier that was lost. None was ended yet that the worker refused: it lost all of a coordinator's."""
    wanted = greedy(prompt, 200)
    async with verifier_serving(loaded, tmp_path, max_streams=4) as address, sharing(address) as shared:
        running = await shared.verify()
        await running.open(prompt, session_id="running", max_tokens=200)
        late = [await shared.verify() for _ in range(40)]
        for number, stream in enumerate(late):
            await stream.send_open(prompt, session_id=f"late {number}", max_tokens=8)
        refused = [await failure_of(stream) for stream in late[3:]]
        assert {each.code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for stream in late:
            stream.call.cancel()
        assert await read_all(running) == wanted
        assert await soon(lambda: shared.num_open == 0, 5)
        again = await shared.verify()
        await again.open(prompt, session_id="again", max_tokens=8)
        assert await read_all(again) == wanted[:8]


async def test_a_session_that_reads_nothing_stops_no_other(loaded: LoadedModel, tmp_path: Path, prompt: Any) -> None:
    """Its verdicts with log-probabilities fill its window; then it gets an error, as on a call of its own."""
    async with verifier_serving(loaded, tmp_path, write_timeout_s=1.0) as address, sharing(address) as shared:
        stalled, reading = await shared.verify(), await shared.verify()
        await stalled.send_open(prompt, session_id="stalled", max_tokens=1500, logprobs=20)
        await reading.open(prompt, session_id="reading", max_tokens=1500)
        assert len(await read_all(reading)) == 1500

        async def ended() -> bool:
            return (await asyncio.to_thread(verifier_load, address)).sessions == 0

        async with asyncio.timeout(20):
            while not await ended():
                await asyncio.sleep(0.05)
        assert stalled.call.raw._unread, "the session has read nothing"
        assert stalled.call.raw._peer_window < WINDOW_BYTES // 2


async def test_a_session_has_at_most_32_messages_on_their_way(
    loaded: LoadedModel, tmp_path: Path, prompt: list[int]
) -> None:
    """The rest waits in the verifier, not in the connection that all sessions share."""
    async with verifier_serving(loaded, tmp_path, write_timeout_s=30.0) as address, sharing(address) as shared:
        stalled, reading = await shared.verify(), await shared.verify()
        await stalled.open(prompt, session_id="stalled", max_tokens=1500)
        arrived = stalled.call.raw._unread
        assert await soon(lambda: len(arrived) >= 31, 10)
        await reading.open(prompt, session_id="reading", max_tokens=600)
        assert len(await read_all(reading)) == 600
        assert len(arrived) <= 32
        assert len(await read_all(stalled)) == 1500, "one after the other, as they are read"


async def test_a_last_verdict_beyond_the_window_waits_until_there_is_room(
    loaded: LoadedModel, tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as any other, not as long as a verifier waits for its peer to close."""
    monkeypatch.setattr("verifier.service.PEER_CLOSE_TIMEOUT_S", 0.2)
    async with verifier_serving(loaded, tmp_path, write_timeout_s=30.0) as address, sharing(address) as shared:
        streams = [await shared.verify() for _ in range(3)]
        for max_tokens, stream in enumerate(streams, start=31):  # and the message before them, of the opening
            await stream.send_open(prompt, session_id=f"{max_tokens}", max_tokens=max_tokens)
            assert await soon(lambda full=stream: len(full.call.raw._unread) == 32, 10)  # type: ignore[misc]
        await asyncio.sleep(0.6)
        for max_tokens, stream in enumerate(streams, start=31):
            assert (await stream.call.read()).HasField("opened")
            assert len(await read_all(stream)) == max_tokens


@pytest.mark.parametrize("plain_steps", [8, None])
async def test_plain_steps_share_a_verdict_while_a_coordinator_is_behind(
    verifier: str, prompt: list[int], plain_steps: int | None
) -> None:
    """The verifier sends nothing more until its ping is answered, so that what is read next is not old."""
    params = {"session_id": "late", "max_tokens": 1500} | ({"plain_steps": plain_steps} if plain_steps else {})
    first = verify.VerifyRequest(open=opening(prompt, **params)).SerializeToString()
    async with grpc.aio.insecure_channel(verifier, options=channel_options()) as channel:
        call = verifier_rpc.VerifierStub(channel).Sessions(timeout=30)
        await call.write(FIRST)
        await call.write(pb.SessionFrames(frames=[opened(1), pb.SessionFrame(stream=1, payload=first)]))
        tokens: list[int] = []
        lengths: list[int] = []
        pauses, pongs, unread = 0, 0, 0
        while len(tokens) < 1500:
            reading = asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait([reading], timeout=0.5)
            if not done:
                pauses += 1
                await call.write(pb.SessionFrames(pong=True))
            batch = await reading
            for frame in batch.frames:
                reply = verify.VerifyReply.FromString(frame.payload)
                if reply.HasField("verdict"):
                    unread += MESSAGE_COST + len(frame.payload)
                    lengths.append(len(reply.verdict.tokens))
                    assert reply.verdict.position == len(prompt) + len(tokens)
                    tokens += reply.verdict.tokens
            if batch.ping:
                pongs += 1
                if pongs != 3:
                    await call.write(pb.SessionFrames(pong=True))
            if unread > WINDOW_BYTES // 2:
                await call.write(pb.SessionFrames(frames=[pb.SessionFrame(stream=1, credit=unread)]))
                unread = 0
        call.cancel()
    assert pauses >= 1, "while the third ping had no answer"
    async with verifying(verifier) as alone:
        await alone.open(prompt, session_id="alone", max_tokens=1500)
        await alone.rest()
    assert tokens == alone.tokens
    assert max(lengths) == (plain_steps or 1)
    assert await soon_free(verifier)


async def test_a_coordinator_that_answers_no_ping_is_waited_for_by_its_window_alone(
    loaded: LoadedModel, tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.SharedStream, "_receive", receive_without_marks)
    async with verifier_serving(loaded, tmp_path, write_timeout_s=1.0) as address, sharing(address) as shared:
        stream = await shared.verify()
        await stream.open(prompt, session_id="silent", max_tokens=1500)
        await asyncio.sleep(0.3)  # until its window is full
        assert len(await read_all(stream)) == 1500


async def receive_without_marks(shared: client.SharedStream, batch: pb.SessionFrames) -> None:
    for frame in batch.frames:
        shared.streams[frame.stream].receive(frame)


async def test_a_cancelled_session_is_freed_and_the_others_go_on(verifier: str, prompt: list[int]) -> None:
    async with sharing(verifier) as shared:
        left, stays = await shared.verify(), await shared.verify()
        for name, stream in (("left", left), ("stays", stays)):
            await stream.open(prompt, session_id=name, max_tokens=300, gamma=4, draft_wait_us=100_000)
        left.call.cancel()
        await left.steer(gamma=0)  # late: nothing is sent after the end
        assert (await failure_of(left)).code() is grpc.StatusCode.CANCELLED
        assert await soon_free(verifier, sessions=1)
        assert await soon(lambda: shared.num_open == 1, 5)
        await stays.steer(gamma=0)
        assert len(await read_all(stays)) == 300


@pytest.mark.parametrize("text", ["x" * 1025, "\u2603" * 1000], ids=["long", "long in bytes"])
async def test_a_header_beyond_the_limits_ends_no_session(verifier: str, prompt: list[int], text: str) -> None:
    async with sharing(verifier) as shared:
        good, bad = await shared.verify(), await shared.verify(("tracestate", text), ("x-request-id", "one"))
        for name, stream in (("good", good), ("bad", bad)):
            await stream.open(prompt, session_id=name, max_tokens=8)
            assert len(await read_all(stream)) == 8


@asynccontextmanager
async def worker_whose_sessions(behaviour: Any) -> AsyncIterator[str]:
    """Serve the method `Sessions` of a verifier with this behaviour."""
    handler = grpc.stream_stream_rpc_method_handler(
        behaviour, pb.SessionFrames.FromString, pb.SessionFrames.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("outrider.v1.Verifier", {"Sessions": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_worker_that_does_not_read_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not read is not kept for ever."""

    async def silent(batches: Any, context: Any) -> AsyncIterator[pb.SessionFrames]:
        yield FIRST
        await asyncio.sleep(3600)

    monkeypatch.setattr(client, "WRITE_TIMEOUT_S", 1.0)
    async with worker_whose_sessions(silent) as address, sharing(address) as shared:
        calls = [await shared.start() for _ in range(64)]
        with capture_logs() as lines:
            for call in calls:
                call.raw.send(b"x" * WINDOW_BYTES)
            failures = [await failure_of(Verify(call)) for call in calls]
        assert {failure.code() for failure in failures} == {grpc.StatusCode.UNAVAILABLE}
        assert "shared stream ended: worker does not read" in [line["event"] for line in lines]
        assert await soon(lambda: shared.calls.shared is None, 5)


async def test_a_worker_that_refuses_our_frames_is_reported() -> None:
    async def refusing(batches: Any, context: Any) -> AsyncIterator[pb.SessionFrames]:
        yield FIRST
        await anext(batches)  # the window
        await anext(batches)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "frame.stream")

    async with worker_whose_sessions(refusing) as address, sharing(address) as shared:
        with capture_logs() as lines:
            assert (await failure_of(Verify(await shared.start()))).code() is grpc.StatusCode.UNAVAILABLE
            told = ("warning", "INVALID_ARGUMENT")
            assert await soon(lambda: told in [(line["log_level"], line.get("status")) for line in lines], 5)


async def test_a_stream_that_was_lost_is_opened_again_on_the_same_channel() -> None:
    opened = 0

    async def lost_at_first(batches: Any, context: Any) -> AsyncIterator[pb.SessionFrames]:
        nonlocal opened
        opened += 1
        yield FIRST
        if opened > 1:
            await asyncio.sleep(3600)
        await anext(batches)  # the window
        await anext(batches)

    async with worker_whose_sessions(lost_at_first) as address, sharing(address) as shared:
        assert (await failure_of(Verify(await shared.start()))).code() is grpc.StatusCode.UNAVAILABLE
        assert await soon(lambda: shared.calls.shared is None, 5)
        assert isinstance((await shared.start()).raw, MultiplexedCall)
        assert opened == 2


async def test_a_worker_without_a_shared_stream_is_asked_for_it_once_and_gets_calls_of_their_own() -> None:
    """How such a call ends is told as within a shared stream."""
    asked = 0

    async def older(batches: Any, context: Any) -> AsyncIterator[pb.SessionFrames]:
        nonlocal asked
        asked += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older verifier")
        yield FIRST

    async with worker_whose_sessions(older) as address, sharing(address) as shared:
        for _ in range(3):
            shared.calls.keep_open(shared._channel)
            assert await soon(lambda: not shared.calls._running, 5)
        assert asked == 1
        own = shared.calls.start(shared._channel, ())
        with pytest.raises(grpc.aio.AioRpcError) as failed:  # it has no method of this name
            await own.read()
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await own.close()


async def test_a_lost_stream_loses_each_of_its_sessions(verifier: str, prompt: list[int]) -> None:
    async with sharing(verifier) as shared:
        streams = [await shared.verify() for _ in range(3)]
        for number, stream in enumerate(streams):
            await stream.open(prompt, session_id=str(number), max_tokens=300, gamma=4, draft_wait_us=1_000_000)
        await shared.calls.close()
        for stream in streams:
            assert isinstance(worker_error(verifier, await failure_of(stream)), PeerLost)
    assert await soon_free(verifier)


async def failure_of(stream: Verify) -> grpc.aio.AioRpcError:
    """Return the status of a failed call, after the messages before it."""
    try:
        while await stream.call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended in order")


async def soon_free(address: str, sessions: int = 0) -> bool:
    for _ in range(200):
        if (await asyncio.to_thread(verifier_load, address)).sessions == sessions:
            return True
        await asyncio.sleep(0.02)
    return False


# What no conforming coordinator sends.


def opened(number: int) -> pb.SessionFrame:
    return pb.SessionFrame(stream=number, open=pb.OpenStream())


FIRST = pb.SessionFrames(window=WINDOW_BYTES)
# The last batch is the one to be refused: a write after it would meet the end and hide its status.
BATCHES: dict[str, list[pb.SessionFrames]] = {
    "no window": [pb.SessionFrames()],
    "a window that cannot be": [pb.SessionFrames(window=2**32 - 1)],
    "frames in the first batch": [pb.SessionFrames(window=WINDOW_BYTES, frames=[opened(1)])],
    "empty": [FIRST, pb.SessionFrames()],
    "too large": [FIRST, pb.SessionFrames(frames=[opened(1)] * (MAX_BATCH_BYTES // 4))],
    "a pong that nobody asked for": [FIRST, pb.SessionFrames(pong=True)],
    "an unknown stream": [FIRST, pb.SessionFrames(frames=[pb.SessionFrame(stream=7, payload=b"x")])],
    "a stream out of turn": [FIRST, pb.SessionFrames(frames=[opened(2)])],
    "opened twice": [FIRST, pb.SessionFrames(frames=[opened(1), opened(1)])],
    "a part too large": [
        FIRST,
        pb.SessionFrames(frames=[opened(1), pb.SessionFrame(stream=1, payload=b"x" * (PART_BYTES + 1))]),
    ],
    "credit for nothing": [FIRST, pb.SessionFrames(frames=[opened(1), pb.SessionFrame(stream=1, credit=2**31)])],
    "beyond its window": [FIRST, pb.SessionFrames(frames=[opened(1)])]
    + [pb.SessionFrames(frames=[pb.SessionFrame(stream=1, payload=b"", more=False)] * 2000)] * 3,  # the last is beyond
}


@pytest.mark.parametrize("manner", BATCHES)
async def test_what_no_coordinator_sends_ends_the_stream(verifier: str, manner: str) -> None:
    async with grpc.aio.insecure_channel(verifier, options=channel_options()) as channel:
        call = Verify(verifier_rpc.VerifierStub(channel).Sessions(timeout=20))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # ended before everything was sent
            for batch in BATCHES[manner]:
                await call.call.write(batch)
        assert (await failure_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await soon_free(verifier)


async def test_a_key_that_is_no_longer_valid_opens_no_session(
    loaded: LoadedModel, tmp_path: Path, prompt: list[int]
) -> None:
    """As with calls of their own: what runs goes on, and new sessions are refused."""
    settings = VerifierSettings(fleet_key="old")
    service = VerifierService(EngineTarget(loaded.engine), loaded.vocabulary, {}, settings)
    async with in_process(service, settings) as address, sharing(address, "old") as shared:
        before = await shared.verify()
        await before.open(prompt, session_id="before", max_tokens=300, gamma=4, draft_wait_us=50_000)
        service.credentials.own_keys.replace_by(ApiKeys(["new"]))
        after = await shared.verify()
        await after.send_open(prompt, session_id="after", max_tokens=8)
        assert (await failure_of(after)).code() is grpc.StatusCode.UNAUTHENTICATED
        await before.steer(gamma=0)
        assert len(await read_all(before)) == 300


# Drafters.


async def test_drafts_of_one_stream(prompt: list[int]) -> None:
    async with drafter_serving(kind="ngram") as address, grpc.aio.insecure_channel(address) as channel:
        shared = Shared(channel, "Drafter", draft.DraftReply.FromString)
        tokens = [5, 6, 7, 8] * 4
        open_draft = draft.OpenDraft(
            epoch=1,
            tokens=tokens,
            prompt_length=4,
            params=common.SamplingParams(seed=1, max_tokens=64, temperature=0.0),
            steer=draft.DraftSteering(gamma=4),
            vocab_size=100,
        )
        calls = []
        for number in range(3):
            call = await shared.start()
            open_draft.session_id = f"s{number}"
            await call.write(draft.DraftRequest(open=open_draft))
            calls.append(call)
        for call in calls:
            assert (await call.read()).WhichOneof("message") == "opened"
            assert list((await call.read()).guess.tokens) == [5, 6, 7, 8]
        await calls[0].write(draft.DraftRequest(committed=draft.Committed(position=10**6, tokens=[1])))
        with pytest.raises(grpc.aio.AioRpcError, match=r"committed\.position"):
            await calls[0].read()
        await calls[1].write(draft.DraftRequest(committed=draft.Committed(position=len(tokens), tokens=[5, 6, 7, 8])))
        assert list((await calls[1].read()).guess.tokens) == [5, 6, 7, 8]
        for call in calls:
            call.cancel()
        assert await soon(lambda: shared.num_open == 0, 5)
        await shared.calls.close()


async def test_steering_that_comes_together_with_an_opening_is_drafted_for() -> None:
    """No later frame of the coordinator, such as the answer of a ping, is needed for that."""
    async with drafter_serving(kind="ngram") as address, grpc.aio.insecure_channel(address) as channel:
        shared = Shared(channel, "Drafter", draft.DraftReply.FromString)
        open_draft = draft.OpenDraft(
            epoch=1,
            tokens=[5, 6, 7, 8] * 4,
            prompt_length=4,
            params=common.SamplingParams(seed=1, max_tokens=64, temperature=0.0),
            steer=draft.DraftSteering(gamma=0),
            vocab_size=100,
        )
        for number in range(4):
            call = await shared.start()
            open_draft.session_id = f"s{number}"
            await call.write(draft.DraftRequest(open=open_draft))
            await call.write(draft.DraftRequest(steer=draft.DraftSteering(gamma=4)))
            assert (await call.read()).WhichOneof("message") == "opened"
            assert list((await asyncio.wait_for(call.read(), 5)).guess.tokens) == [5, 6, 7, 8]
        await shared.calls.close()
