"""A drafter serves a target that has verifiers, of those whose vocabulary is its own or begins as its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from coordinator.api.service import CoordinatorService
from coordinator.workers import compatibility
from coordinator.workers.target import Target
from outrider.base.aio import cancel_all, until
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo
from outrider.protocol.vocabulary import Vocabulary
from outrider.runtime.registration_client import RegistrationClient
from outrider.settings.coordinator import CoordinatorSettings
from outrider.testing.toy_models import byte_tokenizer
from tests.cluster import in_process

NO_REDIS = "redis://127.0.0.1:1"
SHORT = Vocabulary(("a", "b"))
OWN = Vocabulary((*SHORT.tokens, "c"))
LONGER = Vocabulary((*OWN.tokens, "d"))
OTHER = Vocabulary(("a", "x"))
TARGETS = {"own": OWN, "other": OTHER, "longer": LONGER}


@dataclass
class Fleet:
    """A coordinator and the workers that a test starts. They register as all do, and nothing answers behind them."""

    address: str
    service: CoordinatorService
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, info: WorkerInfo, vocabulary: Vocabulary | None) -> None:
        client = RegistrationClient([self.address], lambda: info, vocabulary)
        self.running[info.worker_id] = asyncio.create_task(client.run())

    def verifier(self, name: str, weights: str = "") -> None:
        vocabulary = TARGETS[name]
        model = ModelInfo(name, name, vocabulary_digest=vocabulary.digest, weights_digest=weights)
        address = f"127.0.0.1:{1 + list(TARGETS).index(name)}"
        self.start(WorkerInfo(name, Role.VERIFIER, address, model, "target"), vocabulary)

    def drafter(self, vocabulary: Vocabulary | None, target_digest: str = "") -> None:
        digest = "" if vocabulary is None else vocabulary.digest
        model = ModelInfo("d", "d", vocabulary_digest=digest, target_digest=target_digest)
        self.start(WorkerInfo("d", Role.DRAFTER, "127.0.0.1:9", model, "model"), vocabulary)

    async def leaves(self, name: str) -> None:
        await cancel_all([self.running.pop(name)])
        assert await until(lambda: self.service.sessions.worker_pool.workers.get(name) is None, 20)

    async def joined(self, name: str) -> None:
        assert await until(lambda: self.service.sessions.worker_pool.workers.get(name) is not None, 20)

    async def serves(self, vocabulary: Vocabulary) -> bool:
        """Return whether the drafter comes to serve the targets with a vocabulary."""

        def served() -> bool:
            known = self.service.sessions.worker_pool.workers.get("d")
            return known is not None and known.info.model.vocabulary_digest == vocabulary.digest

        return await until(served, 20)


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    async def fetch(info: ModelInfo, identity: str, _: object) -> Target:
        return Target(info, byte_tokenizer(), TARGETS[info.name], cast(Any, None), identity)

    monkeypatch.setattr(compatibility, "fetch_target", fetch)
    settings = CoordinatorSettings(http_port=-1, heartbeat_ms=100)
    service = CoordinatorService(settings, NO_REDIS)
    async with in_process(service, settings) as address:
        made = Fleet(address, service)
        yield made
        await cancel_all([*made.running.values()])


@pytest.mark.parametrize(
    ("theirs", "first"), [(OWN, OWN), (SHORT, OWN)], ids=["exactly a target's", "the beginning of two"]
)
async def test_it_finds_the_next_target_when_its_own_leaves(
    fleet: Fleet, theirs: Vocabulary, first: Vocabulary
) -> None:
    for name in TARGETS:
        fleet.verifier(name)
        await fleet.joined(name)
    fleet.drafter(theirs)
    assert await fleet.serves(first)
    await fleet.leaves("own")
    assert await fleet.serves(LONGER)
    fleet.verifier("own")
    await fleet.joined("own")
    if theirs is OWN:
        assert await fleet.serves(OWN), "it fits none better"
    await fleet.leaves("longer")
    assert await fleet.serves(OWN)


async def test_it_waits_for_its_target_where_no_other_begins_as_it_does(fleet: Fleet) -> None:
    for name in ("own", "other"):
        fleet.verifier(name)
        await fleet.joined(name)
    fleet.drafter(OWN)
    assert await fleet.serves(OWN)
    with capture_logs() as logs:
        await fleet.leaves("own")
        await asyncio.sleep(0.5)
    assert await fleet.serves(OWN)
    assert not told(logs)


async def test_it_is_compared_with_the_targets_when_they_change_and_not_at_each_heartbeat(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []

    class Tokens(tuple[str, ...]):
        def __getitem__(self, which: Any) -> Any:
            compared.append(which)
            return super().__getitem__(which)

    monkeypatch.setitem(TARGETS, "other", Vocabulary(Tokens(OTHER.tokens)))
    for name in ("own", "other"):
        fleet.verifier(name)
        await fleet.joined(name)
    fleet.drafter(OWN)
    assert await fleet.serves(OWN)
    await fleet.leaves("own")
    assert await until(lambda: bool(compared), 20)
    await asyncio.sleep(1.0)
    assert len(compared) == 1
    fleet.verifier("longer")
    await fleet.joined("longer")
    assert await fleet.serves(LONGER)


async def test_one_that_starts_while_its_target_is_away_serves_another(fleet: Fleet) -> None:
    for name in ("own", "longer"):
        fleet.verifier(name)
        await fleet.joined(name)
    await fleet.leaves("own")
    fleet.drafter(OWN)
    assert await fleet.serves(LONGER)


async def test_of_targets_that_begin_as_it_does_it_serves_the_one_that_it_was_trained_for(fleet: Fleet) -> None:
    """It was refused, because the first one that begins so is another."""
    for name in ("own", "longer"):
        fleet.verifier(name, weights=f"weights of {name}")
        await fleet.joined(name)
    fleet.drafter(SHORT, target_digest="weights of longer")
    assert await fleet.serves(LONGER)
    await fleet.leaves("longer")
    await asyncio.sleep(0.5)
    assert await fleet.serves(LONGER), "it fits no other"


@pytest.mark.parametrize("vocabulary", [None, LONGER], ids=["of any vocabulary", "with a vocabulary"])
async def test_one_that_fits_no_target_yet_is_no_error_while_others_may_follow(
    fleet: Fleet, vocabulary: Vocabulary | None
) -> None:
    """At the start of several targets it told for a moment that it was trained for another one."""
    targets = fleet.service.sessions.targets
    targets.settle_s = 60.0
    fleet.verifier("other", "weights of other")
    await fleet.joined("other")
    with capture_logs() as logs:
        fleet.drafter(vocabulary, "weights of longer" if vocabulary is None else "")
        assert await until(lambda: bool(told(logs)), 20)
        assert [entry["log_level"] for entry in told(logs)] == ["info"]
        assert told(logs)[0]["error"].endswith("; is a verifier of its own target starting?")
        targets.settle_s = 0.0
        assert await until(lambda: len(told(logs)) > 1, 20)
        assert (told(logs)[1]["log_level"], told(logs)[1]["error"] in told(logs)[0]["error"]) == ("error", True)
        fleet.verifier("longer", "weights of longer")
        await fleet.joined("d")


def told(logs: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [entry for entry in logs if entry["event"] == "not registered"]
