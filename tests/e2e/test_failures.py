"""Whoever dies in the middle, every stream ends with the text of an undisturbed run: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
import redis.asyncio as redis

from outrider.base.config import Settings
from outrider.base.grpc_options import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, channel_options, server_options
from outrider.protocol.errors import Expired, Unavailable
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.testing.link_emulator import EmulatedLink
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import (
    SLOWER,
    Cluster,
    Output,
    ask,
    ask_stories,
    client,
    drafter_load,
    failure,
    follow,
    generate,
    generate_resuming,
    server_info,
    until_async,
    verifier_load,
)
from tests.conftest import Models

pytestmark = pytest.mark.timeout(180)

STREAMS = 10
MAX_TOKENS = 240
MIDDLE = 6  # tokens that every stream has when disaster strikes: on a busy machine the fastest is then far ahead
FREED_S = 2.0
ENDLESS = 600  # they last for more than 3.7 s with one guess a step, see SLOWER
LONGEST_GAP_S = 5.0  # 2.5 on a quiet machine


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two coordinators, two verifiers, a drafter of each kind. Each test brings back what it killed."""
    fleet = Cluster(tmp_path_factory.mktemp("fleet"))
    for _ in range(2):
        fleet.add_coordinator()
    for _ in range(2):
        fleet.add_verifier(models.target, *SLOWER)  # a stream lasts longer than a process pauses on a busy machine
    fleet.add_drafter("model", models.draft)
    fleet.add_drafter("ngram")
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture
def whole(fleet: Cluster) -> Iterator[Cluster]:
    """The fleet with everybody alive, whatever the test before left."""
    fleet.revive()
    return fleet


def requests(max_tokens: int = MAX_TOKENS) -> list[pb.GenerateRequest]:
    """Greedy and coupled by turns, with every kind of speculation."""
    wishes = ({"gamma": 4, "drafter": "model"}, {"gamma": 3, "drafter": "ngram"}, {}, {"gamma": 0}, {"gamma": 8})
    return ask_stories(STREAMS, max_tokens, wishes)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(fleet: Cluster) -> list[Output]:
    return list(await asyncio.gather(*(generate_resuming(fleet.addresses, request) for request in requests())))


async def disturbed(
    addresses: list[str], disaster: Callable[[], Awaitable[None]], seconds: float = 90, *, drafted: bool = False
) -> list[Output]:
    """Ten streams, and a disaster when all of them are in the middle, and with `drafted` guesses are accepted."""
    progress: dict[int, int] = {}
    accepted = not drafted
    striking = asyncio.Event()

    def watch(number: int) -> Callable[[Output], None]:
        def on_chunk(output: Output) -> None:
            nonlocal accepted
            progress[number] = len(output.token_ids)
            accepted = accepted or TokenKind.ACCEPTED in output.kinds
            if accepted and len(progress) == STREAMS and min(progress.values()) >= MIDDLE:
                striking.set()

        return on_chunk

    streams = [
        asyncio.create_task(generate_resuming(addresses, request, seconds=seconds, on_chunk=watch(number)))
        for number, request in enumerate(requests())
    ]
    try:
        await asyncio.wait_for(striking.wait(), 60)
        assert max(progress.values()) < MAX_TOKENS, f"a stream was over before all were in the middle: {progress}"
        await disaster()
        return list(await asyncio.gather(*streams))
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def assert_same(outputs: list[Output], undisturbed: list[Output]) -> None:
    for number, (output, wanted) in enumerate(zip(outputs, undisturbed, strict=True)):
        assert output.token_ids == wanted.token_ids, f"stream {number}"
        assert output.text == wanted.text, f"stream {number}"
        assert output.finish is wanted.finish is FinishReason.LENGTH, f"stream {number}"
        assert len(output.token_ids) == MAX_TOKENS


async def test_an_undisturbed_run_needs_no_help(whole: Cluster, undisturbed: list[Output]) -> None:
    for output in undisturbed:
        assert not output.breaks
        assert output.stats.failovers == output.stats.drafter_losses == 0
    assert len({tuple(output.token_ids) for output in undisturbed}) == STREAMS


async def test_drafter_killed(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        for drafter in whole.drafters:
            drafter.kill()

    outputs = await disturbed(whole.addresses[:1], disaster, drafted=True)
    assert_same(outputs, undisturbed)
    assert not any(output.breaks for output in outputs), "clients never learn of it"
    assert any(output.stats.drafter_losses for output in outputs)


async def test_killed_drafter_that_returns_is_used_again(whole: Cluster) -> None:
    """One stream outlives its drafter and is drafted for again."""
    request = ask("return " * 5, gamma=4, drafter="model", temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    accepted = asyncio.Event()

    def on_chunk(output: Output) -> None:
        if TokenKind.ACCEPTED in output.kinds:
            accepted.set()

    async def kill_and_restart() -> None:
        await asyncio.wait_for(accepted.wait(), 30)
        whole.drafters[0].kill()
        await asyncio.to_thread(whole.restart, whole.drafters[0])

    killing = asyncio.create_task(kill_and_restart())
    # The stream may end before the drafter is back on a fast machine: go on asking until one has seen its return.
    output = await generate_resuming(whole.addresses[:1], request, on_chunk=on_chunk)
    await killing
    assert output.stats.drafter_losses >= 1

    async def drafted_again() -> bool:
        after = await generate_resuming(whole.addresses[:1], request)
        assert after.token_ids == output.token_ids
        return after.stats.accepted_tokens > 0

    await until_async(drafted_again, 30, "guesses of the drafter that returned")


async def test_verifier_killed_with_another_present(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        whole.verifiers[0].kill()

    outputs = await disturbed(whole.addresses[:1], disaster)
    assert_same(outputs, undisturbed)
    assert not any(output.breaks for output in outputs), "clients never learn of it"
    assert sum(output.stats.failovers > 0 for output in outputs) >= 2, "it had a share of the streams"


async def test_verifier_stopped_for_seconds(whole: Cluster, undisturbed: list[Output]) -> None:
    """Its connections live, and it says nothing: its sessions move, and nothing that it says later counts."""
    stopped = whole.verifiers[0]
    gaps: list[float] = []
    heard: dict[str, float] = {}

    def on_chunk(output: Output) -> None:
        now = time.monotonic()
        gaps.append(now - heard.get(output.session_id, now))
        heard[output.session_id] = now

    request = ask("Sleep " * 4, gamma=0, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    alone = await generate_resuming(whole.addresses[:1], request)
    streams = [
        asyncio.create_task(generate_resuming(whole.addresses[:1], request, on_chunk=on_chunk)) for _ in range(4)
    ]
    await until_async(lambda: _true(len(heard) == 4 and len(gaps) > 4 * MIDDLE), 30, "all streams in the middle")
    gaps.clear()
    stopped.signal(signal.SIGSTOP)
    try:
        done, _ = await asyncio.wait(streams, timeout=60)
        assert len(done) == 4, "all go on while it sleeps"
    finally:
        stopped.signal(signal.SIGCONT)
    outputs = [stream.result() for stream in streams]
    assert [output.token_ids for output in outputs] == [alone.token_ids] * 4
    assert not any(output.breaks for output in outputs), "clients never learn of it"
    assert sum(output.stats.failovers for output in outputs) >= 1, "it had a share of the streams"
    print(f"longest gap {max(gaps):.2f} s")
    assert max(gaps) < LONGEST_GAP_S
    again = await generate_resuming(whole.addresses[:1], request)
    assert again.token_ids == alone.token_ids
    await until_async(lambda: _true(verifier_load(stopped.address).sessions == 0), 10, "no session left behind")


async def test_every_verifier_killed_and_one_restarted(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        for verifier in whole.verifiers:
            verifier.kill()
        await asyncio.to_thread(whole.restart, whole.verifiers[1])

    outputs = await disturbed(whole.addresses[:1], disaster)
    assert_same(outputs, undisturbed)
    assert not any(output.breaks for output in outputs)
    assert all(output.stats.failovers for output in outputs)


async def test_coordinator_killed(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        whole.coordinators[0].kill()

    outputs = await disturbed(whole.addresses, disaster)
    assert_same(outputs, undisturbed)
    assert all(output.breaks for output in outputs), "every client had to resume"
    assert not any(output.stats.failovers for output in outputs), "and the verifiers were all well"


async def test_coordinator_killed_in_rejection_mode(whole: Cluster) -> None:
    """Tokens that the client has are not drawn again: it brings them along."""
    drawing = ask(
        "Rejection " * 3,
        gamma=4,
        drafter="model",
        temperature=0.9,
        seed=5,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        verification=common.VERIFICATION_REJECTION,
    )
    killed = False

    def on_chunk(output: Output) -> None:
        nonlocal killed
        if len(output.token_ids) > MIDDLE and not killed:
            killed = True
            whole.coordinators[0].kill()

    output = await generate_resuming(whole.addresses, drawing, on_chunk=on_chunk)
    assert len(output.token_ids) == MAX_TOKENS
    assert len(output.breaks) >= 1


async def test_coordinator_killed_after_the_last_token(whole: Cluster) -> None:
    """Its record lacks the end of every output; the clients lack only the word that it was the end."""
    base: dict[str, Any] = {"seed": 5, "gamma": 0, "max_tokens": 40, "ignore_eos": True}
    drawn = base | {"verification": common.VERIFICATION_REJECTION}
    prompt = "The end is the end is the end "
    async with client(whole.addresses[0]) as stub:
        eos = (await stub.GetModelInfo(common.GetModelInfoRequest(), timeout=10)).eos_token_ids[0]
        plain = await generate(stub, ask(prompt, **drawn))
    asked = [
        ask(prompt, **drawn, stop_token_ids=[plain.token_ids[25]]),
        ask(prompt, **drawn, stop=[plain.text[20:23]]),
        ask(prompt, **drawn),
        ask(prompt, **drawn, grammar=common.Grammar(regex="[a-z]{12}")),
        ask(prompt, **(drawn | {"ignore_eos": False}), logit_bias={eos: 100.0}),
        ask(prompt, **base, temperature=0.0),
        ask(prompt, **base, stop=[plain.text[20:23]]),
    ]
    async with client(whole.addresses[0]) as stub:
        calls = [stub.Generate(request, timeout=60) for request in asked]
        ids = [(await anext(aiter(call))).started.session_id for call in calls]
        whole.redis.signal(signal.SIGSTOP)  # nothing is written from here on
        outputs = await asyncio.gather(*(follow(call, Output()) for call in calls))
    whole.coordinators[0].kill()
    whole.redis.signal(signal.SIGCONT)
    async with client(whole.addresses[1]) as stub:
        for session_id, output in zip(ids, outputs, strict=True):
            tokens = output.token_ids
            resume = pb.ResumeRequest(session_id=session_id, from_position=len(tokens), tail=tokens)
            rest = await follow(stub.Resume(resume, timeout=30), Output(token_ids=list(tokens)))
            assert (rest.token_ids, rest.finish, rest.stop) == (tokens, output.finish, output.stop)
            assert output.text.endswith(rest.text)


async def test_redis_killed_and_restarted_empty(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        whole.redis.kill()
        info = await asyncio.to_thread(server_info, whole.address)
        assert not info.durable
        whole.redis.start()
        await asyncio.to_thread(whole.redis.wait_ready)

    outputs = await disturbed(whole.addresses[:1], disaster)
    assert_same(outputs, undisturbed)
    assert not any(output.breaks for output in outputs)
    assert not any(output.stats.failovers for output in outputs)
    await until_async(lambda: _durable(whole.address), 10, "durable again")
    async with client(whole.addresses[1]) as stub:
        for output in outputs:
            again = await follow(stub.Resume(pb.ResumeRequest(session_id=output.session_id), timeout=20), Output())
            assert again.token_ids == output.token_ids


async def test_redis_stays_away(whole: Cluster, undisturbed: list[Output]) -> None:
    """Nothing waits for it: neither running streams nor new ones."""

    async def disaster() -> None:
        whole.redis.kill()

    outputs = await disturbed(whole.addresses[:1], disaster)
    assert_same(outputs, undisturbed)
    async with client(whole.address) as stub:
        output = await generate(stub, requests()[1])
    assert output.token_ids == undisturbed[1].token_ids


async def test_sessions_are_durable_again_when_redis_returns(whole: Cluster, undisturbed: list[Output]) -> None:
    """Redis comes back empty, then the coordinator dies: the other one still knows the sessions."""

    async def disaster() -> None:
        whole.redis.kill()
        whole.redis.start()
        await asyncio.to_thread(whole.redis.wait_ready)
        await until_async(lambda: _durable(whole.address), 10, "durable again")
        # Every session writes with its next tokens.
        await until_async(lambda: _running_in_redis(whole, STREAMS), 10, "all sessions in Redis")
        await until_async(lambda: _knows_verifier(whole.addresses[1]), 10, "the other coordinator knowing a verifier")
        whole.coordinators[0].kill()

    outputs = await disturbed(whole.addresses, disaster)
    assert_same(outputs, undisturbed)


async def test_terminated_verifier_hands_its_streams_over(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        whole.verifiers[0].terminate()

    outputs = await disturbed(whole.addresses[:1], disaster)
    assert_same(outputs, undisturbed)
    assert not any(output.breaks for output in outputs)
    assert await asyncio.to_thread(whole.verifiers[0].wait, 10) == 0


async def test_terminated_coordinator_tells_its_clients_to_resume(whole: Cluster, undisturbed: list[Output]) -> None:
    async def disaster() -> None:
        whole.coordinators[0].terminate()

    outputs = await disturbed(whole.addresses, disaster)
    assert_same(outputs, undisturbed)
    broken = [output.breaks[0] for output in outputs if output.breaks]
    assert len(broken) > STREAMS // 2
    assert all(isinstance(error, Unavailable) for error in broken), "told in words, not by a broken connection"
    assert await asyncio.to_thread(whole.coordinators[0].wait, 15) == 0


async def test_finished_session_can_be_read_again_anywhere(whole: Cluster) -> None:
    request = ask("Read me twice. ", temperature=0.8, seed=3, max_tokens=50, gamma=2)
    async with client(whole.addresses[0]) as first, client(whole.addresses[1]) as second:
        output = await generate(first, request)
        await until_async(lambda: _finish_in_redis(whole, output), 5, "the end of the session in Redis")
        for stub in (first, second):
            tail = Output(token_ids=output.token_ids[:20])
            resume = pb.ResumeRequest(session_id=output.session_id, from_position=20)
            rest = await follow(stub.Resume(resume, timeout=20), tail)
            assert rest.token_ids == output.token_ids
            assert rest.kinds == output.kinds[20:]
            assert rest.seed == output.seed
            assert output.text.endswith(rest.text)


async def test_cancelling_client_frees_everything(whole: Cluster) -> None:
    await _all_free(whole, 10)
    async with client(whole.address) as stub:
        call = stub.Generate(_endless(), timeout=60)
        await _in_the_middle(call)
        assert await _held(whole) > 0
        call.cancel()
        await _all_free(whole, FREED_S)


async def test_broken_connection_frees_everything(whole: Cluster) -> None:
    await _all_free(whole, 10)
    async with EmulatedLink("127.0.0.1", whole.coordinators[0].port) as link, client(link.address) as stub:
        call = stub.Generate(_endless(), timeout=60)
        await _in_the_middle(call)
        link.cut()
        await _all_free(whole, FREED_S)
        call.cancel()


async def test_deadline_frees_everything(whole: Cluster) -> None:
    async with client(whole.address) as stub:
        call = stub.Generate(_endless(), timeout=3)
        await _in_the_middle(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await _all_free(whole, FREED_S)


async def test_cancel_ends_the_stream_and_frees_everything(whole: Cluster) -> None:
    async with client(whole.address) as stub:
        call = stub.Generate(_endless(), timeout=60)
        session_id = await _in_the_middle(call)
        reply = await stub.Cancel(pb.CancelRequest(session_id=session_id), timeout=5)
        assert reply.cancelled
        last = None
        async for reply in call:
            last = reply
        assert last is not None
        assert FinishReason(last.complete.finish_reason) is FinishReason.CANCELLED
        await _all_free(whole, FREED_S)


async def test_without_any_verifier_a_request_fails_in_time(models: Models, tmp_path_factory: pytest.TempPathFactory):
    lonely = Cluster(tmp_path_factory.mktemp("lonely"), redis=False)
    coordinator = lonely.add_coordinator("--worker-wait-s", "1")
    try:
        coordinator.start().wait_ready()
        async with client(coordinator.address) as stub:
            code, error, _ = await failure(stub.Generate(ask("hello", max_tokens=4), timeout=20))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no verifier" in error.message
        assert error.retry_after_ms
    finally:
        lonely.stop()


def test_idle_streams_are_kept_alive() -> None:
    """The server must permit what the clients do, or they die with "too many pings"."""
    server, channel = dict(server_options(Settings())), dict(channel_options())
    assert channel["grpc.keepalive_time_ms"] == KEEPALIVE_MS
    assert channel["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
    # Without it a peer that hangs was noticed after 90 s, whatever the keepalive timeout.
    assert channel["grpc.http2.ping_timeout_ms"] == server["grpc.http2.ping_timeout_ms"] == KEEPALIVE_TIMEOUT_MS
    assert server["grpc.keepalive_permit_without_calls"] == channel["grpc.keepalive_permit_without_calls"] == 1
    assert 4 * 2**20 < server["grpc.max_receive_message_length"] < 2**31 - 1
    assert 0 < server["grpc.max_concurrent_streams"] < 2**31 - 1


def test_a_passed_deadline_is_no_reason_to_resume() -> None:
    assert not issubclass(Expired, Unavailable)


# What the tests above ask again and again.


def _endless() -> pb.GenerateRequest:
    return ask("on and on " * 4, gamma=1, drafter="model", temperature=0.0, max_tokens=ENDLESS, ignore_eos=True)


async def _in_the_middle(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateReply]) -> str:
    """Read until speculation is at work; the session's id."""
    session_id, tokens, accepted = "", 0, False
    async for reply in call:
        session_id = session_id or reply.started.session_id
        tokens += len(reply.chunk.token_ids)
        accepted = accepted or 1 in reply.chunk.kinds
        if tokens > 20 and accepted:
            break
    return session_id


async def _held(fleet: Cluster) -> int:
    """Everything that sessions hold anywhere."""
    held = 0
    for verifier in fleet.verifiers:
        load = await asyncio.to_thread(verifier_load, verifier.address)
        held += load.sessions + load.waiting + load.kv_tokens_used
    for drafter in fleet.drafters:
        held += (await asyncio.to_thread(drafter_load, drafter.address)).sessions
    return held + (await asyncio.to_thread(server_info, fleet.address)).sessions


async def _all_free(fleet: Cluster, seconds: float) -> None:
    async def free() -> bool:
        return await _held(fleet) == 0

    await until_async(free, seconds, "nothing held anywhere")


async def _true(value: bool) -> bool:
    return value


async def _durable(address: str) -> bool:
    return (await asyncio.to_thread(server_info, address)).durable


async def _knows_verifier(address: str) -> bool:
    return any(worker.role == pb.ROLE_VERIFIER for worker in (await asyncio.to_thread(server_info, address)).workers)


async def _running_in_redis(fleet: Cluster, count: int) -> bool:
    """Whether so many sessions are in Redis that have not ended: those of earlier tests may be written late."""
    async with redis.Redis.from_url(fleet.redis.url) as store:
        ends = [int(await store.hget(key, "finish") or 0) async for key in store.scan_iter(match="outrider:session:*")]
        return ends.count(0) >= count


async def _finish_in_redis(fleet: Cluster, output: Output) -> bool:
    """The end of a session reaches Redis behind the client's back."""
    async with redis.Redis.from_url(fleet.redis.url) as store:
        return int(await store.hget(f"outrider:session:{{{output.session_id}}}", "finish") or 0) == output.finish
