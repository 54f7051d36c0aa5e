"""Above temperature 0 the text is a function of target, prompt, parameters and seed: nothing else ever shows in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import pytest_asyncio

from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb
from tests.cluster import SLOWER, Cluster, Output, ask, generate_all, generate_resuming, until_async
from tests.conftest import Models
from tests.e2e.prompts import mixed

pytestmark = pytest.mark.timeout(240)

MAX_TOKENS = 64
LONG = 200
GUESSED_S = 60.0  # until guesses arrive in time: a toy target can end its answers before
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.1, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {65: 12.0, 66: 12.0, 10: -100.0}},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 0.9, "logit_bias": {32: 2.0}},
    {"temperature": 0.6, "top_k": 5, "frequency_penalty": -0.5},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 1},
]
BIASED = 7  # its text does not end before a bias shows
WAYS: list[dict[str, Any]] = [
    {"gamma": 1, "drafter": "model"},
    {"gamma": 4, "drafter": "model"},
    {"gamma": 8, "drafter": "ngram"},
    {"gamma": 1, "drafter": "ngram"},
    {"gamma": 4, "patience_us": 0},
    {},
    {"drafter": "ngram"},
]


def requests(max_tokens: int = MAX_TOKENS, **way: Any) -> list[pb.GenerateRequest]:
    """One per combination of parameters, each with its own prompt and seed."""
    prompts = mixed(40)
    return [
        ask(
            prompts[3 * number],
            seed=10_000 + number,
            max_tokens=max_tokens,
            ignore_eos=number % 2 == 0 or number == BIASED,
            **params,
            **way,
        )
        for number, params in enumerate(PARAMS)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(cluster: Cluster) -> list[Output]:
    """γ = 0, one at a time: nothing but the target, alone in its batch."""
    return await generate_all(cluster.address, requests(gamma=0), concurrency=1)


async def test_plain_runs_are_what_they_should_be(plain: list[Output]) -> None:
    assert all(set(output.kinds) == {TokenKind.PLAIN} for output in plain)
    assert len({tuple(output.token_ids) for output in plain}) == len(PARAMS)
    tokens = Counter(plain[BIASED].token_ids)
    assert not tokens[10], "a bias of -100 forbids"
    assert tokens[65] + tokens[66] > 2, "a bias of 12 invites"


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_speculation_never_shows(cluster: Cluster, plain: list[Output], way: dict[str, Any]) -> None:
    """All at once, so that every session has neighbours in its batches."""

    async def speculated() -> bool:
        outputs = await generate_all(cluster.address, requests(**way), concurrency=len(PARAMS))
        assert_same(outputs, plain)
        return way.get("drafter") != "model" or any(output.stats.accepted_tokens for output in outputs)

    await until_async(speculated, GUESSED_S, "guesses accepted")


async def test_alone_or_with_neighbours(cluster: Cluster, plain: list[Output]) -> None:
    alone = await generate_all(cluster.address, requests(gamma=4, drafter="model"), concurrency=1)
    assert_same(alone, plain)
    busy = [*requests(gamma=4, drafter="model"), *requests(gamma=2, max_tokens=48), *requests(gamma=0, max_tokens=32)]
    crowded = await generate_all(cluster.address, busy, concurrency=len(busy))
    assert_same(crowded[: len(PARAMS)], plain)
    for output, wanted in zip(crowded[len(PARAMS) :], [*plain, *plain], strict=True):
        assert output.token_ids == wanted.token_ids[: len(output.token_ids)], "max_tokens only cuts"


async def test_other_seed_other_text(cluster: Cluster) -> None:
    again = [
        ask("Same prompt, other seed. ", seed=seed, temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True, gamma=2)
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
    ]
    outputs = await generate_all(cluster.address, [*again, *again])
    assert len({tuple(output.token_ids) for output in outputs[: len(again)]}) == len(again)
    for first, second in zip(outputs[: len(again)], outputs[len(again) :], strict=True):
        assert first.token_ids == second.token_ids


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
@pytest.mark.parametrize("way", [{"gamma": 0}, {"gamma": 4, "drafter": "model"}, {"gamma": 4, "drafter": "ngram"}, {}])
async def test_modes_with_probabilities(cluster: Cluster, mode: int, way: dict[str, Any]) -> None:
    """Their text depends on the guesses, so only its form can be tested here; its law is in tests/unit."""

    async def speculated() -> bool:
        outputs = await generate_all(cluster.address, requests(verification=mode, **way), concurrency=len(PARAMS))
        for number, output in enumerate(outputs):
            assert output.finish is FinishReason.LENGTH or number % 2, "ignore_eos goes to the end"
            assert len(output.token_ids) == MAX_TOKENS or output.finish is FinishReason.STOP
            assert output.kinds.count(TokenKind.ACCEPTED) == output.stats.accepted_tokens
            assert len(output.kinds) - output.stats.accepted_tokens in (output.stats.steps, output.stats.steps - 1)
            assert not {10} & set(outputs[7].token_ids)
        if way.get("gamma") == 0:
            assert all(set(output.kinds) == {TokenKind.PLAIN} for output in outputs)
        if way.get("drafter") != "model":
            return True
        kinds = Counter(kind for output in outputs for kind in output.kinds)
        return kinds[TokenKind.ACCEPTED] > MAX_TOKENS and {TokenKind.RECOVERED, TokenKind.BONUS} <= kinds.keys()

    await until_async(speculated, GUESSED_S, "guesses accepted, recovered tokens and bonus tokens")


@pytest.fixture(scope="module")
def breakable(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    fleet = Cluster(tmp_path_factory.mktemp("breakable"))
    fleet.add_coordinator()
    fleet.add_verifier(models.target, *SLOWER)
    fleet.add_drafter("model", models.draft)
    fleet.start()
    yield fleet
    fleet.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def long(cluster: Cluster) -> list[Output]:
    return await generate_all(cluster.address, requests(LONG, gamma=0))


@pytest.mark.parametrize("victim", ["verifier", "drafter"])
async def test_a_crash_in_the_middle_never_shows(long: list[Output], breakable: Cluster, victim: str) -> None:
    """Long outputs; killed and restarted on the same port while every stream is under way and some are drafted for."""
    process = {"verifier": breakable.verifiers, "drafter": breakable.drafters}[victim][0]
    progress: dict[int, int] = {}
    drafted: set[int] = set()
    striking = asyncio.Event()

    def watch(number: int, output: Output) -> None:
        progress[number] = len(output.token_ids)
        if TokenKind.ACCEPTED in output.kinds:
            drafted.add(number)
        if len(progress) == len(PARAMS) and sum(progress.values()) > 20 * len(PARAMS) and len(drafted) > 3:
            striking.set()

    async def strike() -> None:
        await asyncio.wait_for(striking.wait(), 60)
        process.kill()
        await asyncio.to_thread(breakable.restart, process)

    striker = asyncio.create_task(strike())
    outputs = await asyncio.gather(
        *(
            generate_resuming(
                [breakable.address], request, on_chunk=lambda output, number=number: watch(number, output), seconds=90
            )
            for number, request in enumerate(requests(LONG, gamma=4))
        )
    )
    await striker
    assert_same(list(outputs), long)
    assert not any(output.breaks for output in outputs)
    losses = [
        output.stats.failovers if victim == "verifier" else output.stats.drafter_losses
        for output in outputs
        if len(output.token_ids) == LONG
    ]
    assert sum(loss > 0 for loss in losses) >= 2, losses


def assert_same(outputs: list[Output], wanted: list[Output]) -> None:
    for number, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
        assert output.token_ids == want.token_ids, PARAMS[number]
        assert output.text == want.text, PARAMS[number]
        assert (output.finish, output.seed) == (want.finish, want.seed), PARAMS[number]
