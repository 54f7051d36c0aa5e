"""Both clients of the package against real processes: their coordinator is killed and the text goes on exactly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.client.aio import AsyncClient
from outrider.client.events import collect
from outrider.client.sync import Client, Finished, Reply, Started, Tokens
from outrider.protocol.errors import Expired, InvalidRequest, NotFound, PeerLost
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import FinishReason
from tests.cluster import ROOT, SLOWER, Cluster, environment, free_port, server_info, until_async
from tests.conftest import Models

pytestmark = pytest.mark.timeout(180)

STREAMS = 4  # an even number: see outrider.client.resume.EndpointRotation
MIDDLE = 20
LENGTH = 240
FREED_S = 2.0  # a plain answer goes on for 3 s, see SLOWER


@pytest.fixture(scope="module")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two coordinators and one of each worker."""
    fleet = Cluster(tmp_path_factory.mktemp("clients"))
    for _ in range(2):
        fleet.add_coordinator()
    fleet.add_verifier(models.target, *SLOWER)  # a stream lasts longer than a process pauses on a busy machine
    fleet.add_drafter("model", models.draft)
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture
def whole_fleet(fleet: Cluster) -> Cluster:
    """With everybody alive, whatever the test before left."""
    fleet.revive()
    return fleet


def asked(number: int, mode: Verification | None = None) -> dict[str, Any]:
    return {
        "prompt": f"Stream {number}: once upon a time, ",
        "params": SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            max_tokens=LENGTH,
            ignore_eos=True,
            verification=mode,
        ),
        "gamma": 3 if number < 2 else None,
    }


def assert_gapless(replies: list[Reply]) -> None:
    """Started once, every token once, Finished at the end."""
    assert [type(reply) for reply in replies if not isinstance(reply, Tokens)] == [Started, Finished]
    position = 0
    for reply in replies[1:-1]:
        assert isinstance(reply, Tokens)
        assert reply.position == position
        position += len(reply.token_ids)
    assert position == LENGTH


def test_sync_client_goes_on_elsewhere(whole_fleet: Cluster) -> None:
    with Client(whole_fleet.addresses[1:]) as other:
        wanted = other.complete(**asked(0))
    with Client(whole_fleet.addresses) as client:
        replies: list[Reply] = []
        for reply in client.generate(**asked(0)):
            replies.append(reply)
            if len(replies) == 1 + MIDDLE // 4:
                whole_fleet.coordinators[0].kill()
    assert_gapless(replies)
    made = collect(replies)
    assert (made.token_ids, made.text) == (wanted.token_ids, wanted.text)
    assert not whole_fleet.coordinators[0].alive


async def test_async_client_goes_on_elsewhere(whole_fleet: Cluster) -> None:
    """Several streams of one client, all in the middle when their coordinator dies."""
    async with AsyncClient(whole_fleet.addresses[1:]) as other:
        wanted = await asyncio.gather(*(other.complete(**asked(number)) for number in range(STREAMS)))
    progress = dict.fromkeys(range(STREAMS), 0)
    striking = asyncio.Event()

    async def read(client: AsyncClient, number: int) -> list[Reply]:
        replies: list[Reply] = []
        async for reply in client.generate(**asked(number)):
            replies.append(reply)
            if isinstance(reply, Tokens):
                progress[number] += len(reply.token_ids)
            if min(progress.values()) >= MIDDLE:
                striking.set()
        return replies

    async with AsyncClient(whole_fleet.addresses) as client:
        streams = [asyncio.create_task(read(client, number)) for number in range(STREAMS)]
        await asyncio.wait_for(striking.wait(), 60)
        assert max(progress.values()) < LENGTH, "all are in the middle"
        whole_fleet.coordinators[0].kill()
        outputs = await asyncio.wait_for(asyncio.gather(*streams), 90)
    for replies, undisturbed in zip(outputs, wanted, strict=True):
        assert_gapless(replies)
        made = collect(replies)
        assert (made.token_ids, made.text) == (undisturbed.token_ids, undisturbed.text)
        assert made.finished.finish_reason is FinishReason.LENGTH


async def test_async_client_that_stops_reading_frees_everything(whole_fleet: Cluster) -> None:
    async with AsyncClient(whole_fleet.addresses) as client:
        async with contextlib.aclosing(client.generate(**asked(1) | {"gamma": 0})) as replies:
            async for reply in replies:
                if isinstance(reply, Tokens):
                    break

        async def nothing_left() -> bool:
            return server_info(whole_fleet.address).sessions == 0

        await until_async(nothing_left, FREED_S, "no session left")


async def test_async_client_surface(whole_fleet: Cluster) -> None:
    """Resume, model, server, and what fails."""
    with Client(whole_fleet.addresses) as synchronous:
        assert await AsyncClient(whole_fleet.addresses).model() == synchronous.model()
    async with AsyncClient(whole_fleet.addresses) as client:
        assert len((await client.server()).workers) == 2
        replies = [reply async for reply in client.generate(**asked(1))]
        made = collect(replies)
        again = [reply async for reply in client.resume(made.started.session_id, 10, made.token_ids[:10])]
        assert collect(again).token_ids == made.token_ids[10:]
        assert await client.cancel(made.started.session_id) is False
        with pytest.raises(NotFound):
            await client.cancel("nobody's")
        with pytest.raises(NotFound):
            [reply async for reply in client.resume("nobody's")]
        with pytest.raises(InvalidRequest):
            await client.complete("x", params=SamplingParams(max_tokens=0))
    async with AsyncClient(whole_fleet.addresses, timeout_s=0.01) as hurried:
        with pytest.raises(Expired):
            await hurried.complete(**asked(1))


async def test_async_client_cancels(whole_fleet: Cluster) -> None:
    """From elsewhere than who reads."""
    session_id = ""
    cancelled = []
    async with AsyncClient(whole_fleet.addresses) as client:
        async for reply in client.generate(**asked(1)):
            if isinstance(reply, Started):
                session_id = reply.session_id
            elif isinstance(reply, Tokens) and not cancelled:
                cancelled.append(await client.cancel(session_id))
            elif isinstance(reply, Finished):
                assert reply.finish_reason is FinishReason.CANCELLED
                assert reply.output_tokens < LENGTH
    assert cancelled == [True]


async def test_nobody_there_is_told_soon() -> None:
    async with AsyncClient([f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]) as client:
        with pytest.raises(PeerLost):
            await asyncio.wait_for(client.complete("Hello"), 20)


def example(*line: str, **variables: str) -> str:
    env = environment(**variables)
    done = subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples(whole_fleet: Cluster) -> None:
    endpoints = ",".join(whole_fleet.addresses)
    assert re.search(r"[1-9]\d* tokens in [1-9]\d* steps", example("examples/stream.py", "Why?", endpoints))
    said = example("examples/async_stream.py", endpoints)
    for question in ("three rivers", "three mountains", "three seas", "long story"):
        assert question in said


C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, C_LOCALE], ids=["ascii", "C"])
def test_a_text_beyond_what_the_output_can_encode_is_escaped(whole_fleet: Cluster, variables: dict[str, str]) -> None:
    """It ended the command in the middle of the text."""
    command = ("-c", "from outrider.cli import main; main()")
    asked = ("generate", "Which?", "--endpoint", whole_fleet.addresses[0], "--regex", "\\u00e9{2}\\U0001f426")
    assert example(*command, *asked, **variables) == "\\xe9\\xe9\\U0001f426\n"
    assert json.loads(example(*command, *asked, "--json", **variables))["text"] == "\xe9\xe9\U0001f426"
    for line in ((*command, "generate"), ("-m", "coordinator")):
        assert "\\u03b3" in example(*line, "--help", **variables)
