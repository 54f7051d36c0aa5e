"""Streams to workers that nobody reads: their seats are free again after a while, and others are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from outrider.engine.loading.loader import LoadedModel
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import failure, until_async, verifier_load
from tests.contract.conftest import Greedy, opening, verifier_serving, verifying
from tests.http2 import Http2, message

SEATS = 8
PROMPT = [*range(40, 80)]


async def test_unread_streams_leave_their_seats(loaded: LoadedModel, greedy: Greedy, tmp_path: Path) -> None:
    async def holds(sessions: int) -> bool:
        return (await asyncio.to_thread(verifier_load, address)).sessions == sessions

    async with verifier_serving(loaded, tmp_path, max_sessions=SEATS, max_waiting=0, write_timeout_s=1.0) as address:

        def open_all(peer: Http2) -> None:
            """And read no more than the size of a window, which is never given back."""
            for number in range(SEATS):
                opened = opening(PROMPT, session_id=f"unread {number}", max_tokens=1500, logprobs=20)
                peer.call(2 * number + 1, "/outrider.v1.Verifier/Verify")
                sent = peer.data(2 * number + 1, message(verify.VerifyRequest(open=opened).SerializeToString()))
                assert sent

        with Http2(address) as peer:
            await asyncio.to_thread(open_all, peer)
            await until_async(lambda: holds(SEATS), 10, "every seat taken")
            async with verifying(address) as refused:
                await refused.send_open(PROMPT)
                code, _, _ = await failure(refused.call)
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await until_async(lambda: holds(0), 20, "every seat free")
            async with verifying(address) as stream:
                await stream.open(PROMPT, max_tokens=8)
                await stream.rest()
    assert stream.tokens == greedy(PROMPT, 8)


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
