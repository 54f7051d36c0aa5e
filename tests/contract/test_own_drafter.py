"""A verifier with a drafter in its own process: the same texts, and nothing of a round crosses a drafter's stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.api.service import CoordinatorService
from coordinator.control.gamma import Controller
from coordinator.persistence.pair_history import PairHistoryStore
from coordinator.placement.choice import load_of
from outrider.base.aio import background
from outrider.base.aio import until as soon
from outrider.protocol.speculation import TokenKind
from outrider.settings.coordinator import CoordinatorSettings
from outrider.v1 import common_pb2 as common
from tests.cluster import Cluster, Output, ask, client, generate, generate_all, in_process, server_info, until
from tests.conftest import Models

pytestmark = pytest.mark.timeout(120)

LENGTH = 128  # tokens: a drafter attaches while the first ones are decoded
PROMPTS = ["Once upon a time, ", "one two three one two three one two ", "The river and the river and "]


@pytest.fixture(scope="module")
def together(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("together"))
    cluster.add_coordinator()
    cluster.add_verifier(models.target, "--own-drafter", f"suffix+model:{models.draft}", "--log-level", "debug")
    registered(cluster.start())
    yield cluster
    cluster.stop()


def registered(cluster: Cluster) -> None:
    """Wait for both workers of the one process."""
    until(lambda: len(server_info(cluster.address).workers) == 2, 20, "the verifier and its drafter")


async def texts(cluster: Cluster, gamma: int | None, **params: object) -> list[Output]:
    requests = [ask(prompt, gamma=gamma, seed=5, max_tokens=LENGTH, ignore_eos=True, **params) for prompt in PROMPTS]
    return await generate_all(cluster.address, requests)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_text_is_that_of_plain_decoding(together: Cluster, temperature: float) -> None:
    plain = await texts(together, 0, temperature=temperature)
    for gamma in (1, 4, None):
        outputs = await texts(together, gamma, temperature=temperature)
        assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
        if gamma is None:
            continue
        accepted = sum(each.kinds.count(TokenKind.ACCEPTED) for each in outputs)
        assert accepted > 0, "guesses came and some held"
        for each in outputs:
            assert each.stats.drafter == "suffix+model"
            assert not each.stats.drafter_losses
            assert each.stats.drafts
            assert each.stats.bytes_per_guessed_token == 0.0, "no stream carried them"
            (drafter,) = each.stats.drafters
            assert drafter.guessed >= drafter.accepted
            assert drafter.guessed >= each.stats.drafts, "those that were checked are told"
            assert each.stats.mean_draft_ms > 0.0


async def test_the_end_of_a_session_tells_what_was_guessed(together: Cluster) -> None:
    """In the drafter's log and span: its stream carries no guesses, so that it counted none."""
    output = (await texts(together, 4, temperature=0.0))[0]
    told = re.compile(rf"session ended .*hop=draft .*session_id={output.session_id} .*tokens=(\d+)")
    found = await asyncio.to_thread(until, lambda: told.search(together.verifiers[0].log()), 10, "its session's end")
    (drafter,) = output.stats.drafters
    assert int(found[1]) >= drafter.guessed > 0


async def test_drawn_guesses_hold_by_their_distributions(together: Cluster) -> None:
    outputs = await texts(together, 2, temperature=0.8, verification=common.VERIFICATION_REJECTION)
    assert all(len(each.token_ids) == LENGTH for each in outputs)
    assert sum(each.kinds.count(TokenKind.ACCEPTED) for each in outputs) > 0


async def test_a_killed_verifier_takes_its_drafter_along_and_both_come_back(together: Cluster) -> None:
    (before,) = {each.stats.drafter for each in await texts(together, 2, temperature=0.0)}
    together.verifiers[0].kill()
    together.restart(together.verifiers[0])
    together.wait_whole()
    registered(together)
    (after,) = {each.stats.drafter for each in await texts(together, 2, temperature=0.0)}
    assert before == after == "suffix+model"


@pytest.mark.parametrize(("temperature", "others", "drafter"), [(0.8, 0, ""), (0.0, 0, "suffix+model"), (0.0, 3, "")])
async def test_only_greedy_answers_alone_attach_it_in_spite_of_a_debt(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, others: int, drafter: str
) -> None:
    """Draws are guessed less often. Beside others its work delays the steps of all, and guesses seldom pay."""
    monkeypatch.setattr(PairHistoryStore, "settle", lambda *_: -20.0)
    monkeypatch.setattr(Controller, "would_guess", lambda *_: False)
    settings = CoordinatorSettings(http_port=-1)
    service, cluster = CoordinatorService(settings, "redis://127.0.0.1:1"), Cluster(tmp_path)
    async with in_process(service, settings) as address:
        verifier = cluster.add_verifier(
            models.target, "--own-drafter", f"suffix+model:{models.draft}", "--coordinators", address
        )
        try:
            await asyncio.to_thread(verifier.start)
            pool = service.sessions.worker_pool
            assert await soon(lambda: len(pool.connections()) == 2, 60)
            params = {"temperature": temperature, "seed": 5, "ignore_eos": True}
            plain = [ask(PROMPTS[1], gamma=0, max_tokens=8 * LENGTH, **params) for _ in range(others)]
            async with client(address) as stub, background(*(drain(stub.Generate(each)) for each in plain)):
                assert await soon(lambda: max(map(load_of, pool.connections())) == others, 10)
                output = await generate(stub, ask(PROMPTS[0], max_tokens=LENGTH, **params))
                assert output.stats.drafter == drafter
        finally:
            await asyncio.to_thread(cluster.stop)


async def drain(replies: AsyncIterator[object]) -> None:
    async for _ in replies:
        await asyncio.sleep(0)
