"""One drafter with many sessions over real sockets: whose guesses it drafts, and what its time brings."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from drafter import loop
from drafter.shares.shares import FEW, DraftingShares, patience
from outrider.base.grpc_options import channel_options
from outrider.protocol import convert
from outrider.speculation.tree import GuessTree
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc as rpc
from tests.conftest import Models
from tests.contract.conftest import drafter_serving

pytestmark = pytest.mark.timeout(120)

PROMPT = list(range(40, 72))
VOCAB = 257
PACE = "1:6,8:20"  # a drafting step: 4 ms, and 2 ms for each session
VERIFY_S = 0.04
HIGH, LOW = 0.9, 0.1
SESSIONS = [HIGH, LOW] * 4


class Checked:
    """A session from its coordinator's side. A guess holds with `chance`; what holds is drawn, not what is guessed."""

    def __init__(self, name: str, chance: float) -> None:
        self.name, self.chance = name, chance
        self.drafted = self.accepted = 0
        self.longest_silence_s = 0.0
        self._random = random.Random(name)
        self._tokens = list(PROMPT)
        self._tree = GuessTree(self._tokens, single=False, max_nodes=128, max_ahead=64)
        self._heard_at = time.perf_counter()

    async def run(self, channel: grpc.aio.Channel) -> None:
        call = rpc.DrafterStub(channel).Draft(timeout=100)
        opening = pb.OpenDraft(
            session_id=self.name,
            epoch=1,
            tokens=PROMPT,
            prompt_length=len(PROMPT),
            params=common.SamplingParams(temperature=0.0, seed=1, max_tokens=1500),
            steer=pb.DraftSteering(gamma=16, eager=True),
            vocab_size=VOCAB,
        )
        await call.write(pb.DraftRequest(open=opening))
        hearing = asyncio.create_task(self._hear(call))
        try:
            while True:
                await asyncio.sleep(VERIFY_S)
                await self._verify(call)
        finally:
            hearing.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hearing

    def count_from_now(self) -> None:
        self.drafted = self.accepted = 0
        self.longest_silence_s, self._heard_at = 0.0, time.perf_counter()

    async def _hear(self, call: Any) -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            if reply.WhichOneof("message") == "guess" and reply.guess.tokens:
                now = time.perf_counter()
                self.longest_silence_s = max(self.longest_silence_s, now - self._heard_at)
                self._heard_at = now
                self.drafted += len(reply.guess.tokens)
                self._tree.add(convert.guess_from_proto(reply.guess))

    async def _verify(self, call: Any) -> None:
        new: list[int] = []
        for token in self._tree.block(8, 8, chain=True).tokens:
            holds = self._random.random() < self.chance
            new.append(token if holds else (token + 1) % 256)
            self.accepted += holds
            if not holds:
                break
        if new:
            position = len(self._tokens)
            self._tokens.extend(new)
            self._tree.commit(new)
            await call.write(pb.DraftRequest(committed=pb.Committed(position=position, tokens=new)))


async def drafted_for(models: Models, chances: Sequence[float], seconds: float, warm_s: float = 1.5) -> list[Checked]:
    """Return the sessions of one drafter after some seconds; what came before it knew them does not count."""
    sessions = [Checked(f"s{number}", chance) for number, chance in enumerate(chances)]
    settings = {"kind": "model", "model": str(models.draft), "device": "cpu", "pace": PACE, "kv_tokens": 32_768}
    async with (
        drafter_serving(**settings) as address,
        grpc.aio.insecure_channel(address, options=channel_options()) as channel,
    ):
        running = [asyncio.create_task(session.run(channel)) for session in sessions]
        try:
            await asyncio.sleep(warm_s)
            for session in sessions:
                session.count_from_now()
            await asyncio.sleep(seconds)
            assert not any(task.done() for task in running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return sessions


def of(sessions: Sequence[Checked], chance: float) -> list[Checked]:
    return [session for session in sessions if session.chance == chance]


async def test_sessions_whose_guesses_hold_get_the_larger_share_and_none_starves(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, steps = DraftingShares.measure, list[float]()

    def count(*step: Any) -> None:
        steps.append(time.perf_counter())
        measure(*step)

    monkeypatch.setattr(DraftingShares, "measure", count)
    sessions = await drafted_for(models, SESSIONS, 5.0)
    counted = sum(at > steps[-1] - 5.0 for at in steps)
    high, low = ([session.drafted for session in of(sessions, chance)] for chance in (HIGH, LOW))
    assert min(high) > 3 * max(low), (high, low)
    assert min(low) > counted / (2 * patience(len(sessions))), "the least that patience gives, and half of it to spare"
    assert max(session.longest_silence_s for session in of(sessions, LOW)) < 1.0


async def test_two_sessions_share_every_step(models: Models) -> None:
    sessions = await drafted_for(models, [LOW, LOW], 2.0)
    first, second = (session.drafted for session in sessions)
    assert min(first, second) > 0.7 * max(first, second)


@pytest.mark.prove
async def test_a_drafters_second_brings_more_accepted_tokens(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare it with steps of all sessions, which is what a drafter of few sessions does."""
    found: dict[int, float] = {}
    for few in (len(SESSIONS), FEW) * 3:
        monkeypatch.setattr(loop, "FEW", few)
        sessions = await drafted_for(models, SESSIONS, 8.0)
        rates = {chance: sum(each.accepted for each in of(sessions, chance)) / 8.0 for chance in (HIGH, LOW)}
        found[few] = found.get(few, 0.0) + sum(rates.values()) / 3
        drafted = {chance: sum(each.drafted for each in of(sessions, chance)) for chance in (HIGH, LOW)}
        silence_s = max(each.longest_silence_s for each in sessions)
        print(f"few={few}: accepted/s {rates}, drafted {drafted}, longest silence {silence_s:.2f} s")
    shared, alike = found[FEW], found[len(SESSIONS)]
    print(f"accepted tokens per drafter second: {alike:.0f} in steps of all, {shared:.0f} in shares")
    assert shared > 1.1 * alike
