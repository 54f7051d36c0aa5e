"""Streams to workers that nobody reads: their seats are free again after a while, and others are served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.engine.loading.loader import LoadedModel
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Cluster, failure, until_async, verifier_load
from tests.conftest import Models
from tests.contract.conftest import Greedy, opening, verifier_serving, verifying
from tests.http2 import Http2, message

SEATS = 8
DEFAULT_SEATS = 64
TOKENS = 600
PROMPT = [*range(40, 80)]


async def holds(address: str, sessions: int) -> bool:
    return (await asyncio.to_thread(verifier_load, address)).sessions == sessions


def open_unread(peer: Http2, streams: int) -> None:
    """Open streams and read no more than one flow-control window of each."""
    for number in range(streams):
        opened = opening(PROMPT, session_id=f"unread {number}", max_tokens=TOKENS, logprobs=20)
        peer.call(2 * number + 1, "/outrider.v1.Verifier/Verify")
        assert peer.data(2 * number + 1, message(verify.VerifyRequest(open=opened).SerializeToString()))


async def test_unread_streams_leave_their_seats(loaded: LoadedModel, greedy: Greedy, tmp_path: Path) -> None:
    async with verifier_serving(loaded, tmp_path, max_sessions=SEATS, max_waiting=0, write_timeout_s=3.0) as address:
        with Http2(address) as peer:
            await asyncio.to_thread(open_unread, peer, SEATS)
            await until_async(lambda: holds(address, SEATS), 10, "every seat taken")
            async with verifying(address) as refused:
                await refused.send_open(PROMPT)
                code, _, _ = await failure(refused.call)
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await until_async(lambda: holds(address, 0), 20, "every seat free")
            async with verifying(address) as stream:
                await stream.open(PROMPT, max_tokens=8)
                await stream.rest()
    assert stream.tokens == greedy(PROMPT, 8)


@pytest.fixture
def mock(models: Models, tmp_path: Path) -> Iterator[Cluster]:
    """Yield a verifier as a process, without a model: its memory is that of its streams."""
    cluster = Cluster(tmp_path, redis=False)
    cluster.add_coordinator()
    cluster.add_verifier(models.target, "--engine", "mock", "--write-timeout-s", "2")
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
async def test_unread_streams_need_little_more_memory_than_streams_that_are_read(mock: Cluster) -> None:
    (verifier,) = mock.verifiers

    async def read(number: int) -> None:
        async with verifying(verifier.address) as stream:
            await stream.open(PROMPT, session_id=f"read {number}", max_tokens=TOKENS, logprobs=20)
            await stream.rest()
            assert len(stream.tokens) == TOKENS

    idle_mb = verifier.peak_memory_mb(anew=True)
    await asyncio.gather(*(read(number) for number in range(DEFAULT_SEATS)))
    read_mb = verifier.peak_memory_mb()
    with Http2(verifier.address) as peer:
        await asyncio.to_thread(open_unread, peer, DEFAULT_SEATS)
        await until_async(lambda: holds(verifier.address, 0), 30, "every seat free")
    unread_mb = verifier.peak_memory_mb()
    print(f"idle {idle_mb:.0f} MB, {DEFAULT_SEATS} streams read {read_mb:.0f} MB, unread {unread_mb:.0f} MB")
    assert unread_mb <= read_mb + 32
    await read(DEFAULT_SEATS)


async def test_a_peer_that_sends_nonsense_and_reads_nothing_is_left(loaded: LoadedModel, tmp_path: Path) -> None:
    """Every refusal is an answer that nobody reads."""
    guess = verify.VerifyRequest()
    guess.guess.position = 10**6
    guess.guess.tokens.append(1)
    flood = message(guess.SerializeToString()) * 500

    def send(peer: Http2) -> None:
        opened = opening(PROMPT, max_tokens=1500, gamma=1, draft_wait_us=10_000_000)
        peer.call(1, "/outrider.v1.Verifier/Verify")
        peer.data(1, message(verify.VerifyRequest(open=opened).SerializeToString()))
        for _ in range(20):
            peer.data(1, flood, seconds=5)

    async with verifier_serving(loaded, tmp_path, max_sessions=SEATS, write_timeout_s=1.0) as address:
        with Http2(address) as peer:
            await asyncio.to_thread(send, peer)

            async def gone() -> bool:
                return (await asyncio.to_thread(verifier_load, address)).sessions == 0

            await until_async(gone, 20, "the stream ended")
