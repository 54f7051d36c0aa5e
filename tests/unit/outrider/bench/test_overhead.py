"""What is not measured is no result: a session that ends too early, and one that ends before its drafter guesses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from outrider.bench.overhead import concurrent_rounds
from outrider.bench.overhead.command import _rounds
from outrider.bench.overhead.concurrent_rounds import _check_running
from outrider.client.events import Finished
from outrider.client.sync import Client
from outrider.launch.stack import Stack
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason
from outrider.protocol.statistics import GenerationStats


def session(draft_tokens: int) -> list[Finished]:
    return [Finished("", FinishReason.LENGTH, "", 3, 100, GenerationStats(draft_tokens=draft_tokens))]


def test_rounds_are_those_of_a_session_that_had_its_drafter() -> None:
    ended: list[Any] = [session(0), session(199), session(200), session(400)]
    client = Mock(Client, generate=Mock(side_effect=ended))
    assert _rounds(client, 100, 4).finished == ended[2][0]
    assert client.generate.call_count == 3


def test_plain_steps_need_no_drafter() -> None:
    client = Mock(Client, generate=Mock(side_effect=[session(0)]))
    assert _rounds(client, 100, 0).finished.stats.draft_tokens == 0


def test_no_drafter_at_all_is_an_error() -> None:
    client = Mock(Client, generate=Mock(side_effect=lambda **_: session(0)))
    with pytest.raises(OutriderError, match="had few guesses or none"):
        _rounds(client, 100, 4)


def test_sessions_outlast_their_measurement_and_are_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Silent:
        async def generate(self, params: SamplingParams, **_: Any) -> AsyncIterator[Finished]:
            asked.append(params.max_tokens)
            await asyncio.Event().wait()
            yield session(0)[0]

        async def close(self) -> None:
            """Do nothing: there is no connection."""

    monkeypatch.setattr(concurrent_rounds, "AsyncClient", lambda _: Silent())
    monkeypatch.setattr(concurrent_rounds, "_START_S", 0.1)
    for sessions in (1, 300):
        with pytest.raises(OutriderError, match=f"{sessions} sessions had no tokens or no guesses for 0.1 s"):
            concurrent_rounds.measure_rounds(Mock(Stack, endpoints=["a:1"]), sessions, 5.0, 4)
    assert asked[0] > 15 * 25_000, "tokens per second with guesses of 16 tokens"
    assert sum(asked[1:]) <= concurrent_rounds.MOST_TOKENS


async def test_a_session_that_failed_or_ended_is_named() -> None:
    async def fail() -> None:
        raise ValueError("the cause")

    async def end() -> None:
        pass

    for ended, error, words in ((fail(), ValueError, "the cause"), (end(), OutriderError, "session 1 ended")):
        tasks = [asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(ended)]
        _check_running(tasks)
        await asyncio.wait(tasks[1:])
        with pytest.raises(error, match=words):
            _check_running(tasks)
        tasks[0].cancel()
