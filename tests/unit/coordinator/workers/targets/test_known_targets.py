"""Which target a name stands for, and which targets are forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.workers.target import Target
from coordinator.workers.targets.known_targets import _MAX_WAITING, MAX_TARGETS, KnownTargets, ModelNames
from outrider.protocol.errors import NotFound, Overloaded, StartupError, Unavailable
from outrider.protocol.fleet import ModelInfo

NOTHING: Any = None


def target(name: str, identity: str = "") -> Target:
    return Target(ModelInfo(name, identity or name), NOTHING, NOTHING, NOTHING, identity or name)


def known(*names: str, **given: str) -> KnownTargets:
    targets = KnownTargets(ModelNames.read(**({"served": "", "default": "", "aliases": ""} | given)))
    for name in names:
        targets.add(target(name), lambda _: [1])
    return targets


def test_the_first_is_the_default() -> None:
    targets = known("a", "b")
    assert targets.named(None) == targets.named("") == targets.named("a")
    assert targets.named("b").info.name == "b"
    assert list(targets.listed()) == ["a", "b"]


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(NotFound, match=r"there is no model 'c' here, only a, b$") as refused:
        known("a", "b").named("c")
    assert (refused.value.field, refused.value.limit) == ("model", "a, b")
    with pytest.raises(NotFound, match="characters"):
        known("a").named("c" * 10_000)


def test_before_any_target_a_request_waits_for_one() -> None:
    for name in ("", "a"):
        with pytest.raises(Unavailable, match="no verifier has reported yet"):
            known().named(name)


def test_a_default_is_named_by_its_name_or_an_alias() -> None:
    assert known("a", "b", default="b").named("").info.name == "b"
    assert known("a", "b", default="best", aliases="best=b").named("").info.name == "b"
    assert list(known("a", "b", default="b").listed()) == ["b", "a"]


def test_a_default_that_is_not_there_yet_is_no_other_model() -> None:
    targets = known("a", default="b")
    with pytest.raises(Unavailable, match="no verifier of the default model b has reported yet"):
        targets.named("")
    assert targets.named("a").info.name == "a"


def test_no_name_is_unknown_before_the_fleet_has_settled() -> None:
    """After a restart the workers of one target are there first; those of others follow."""
    targets = known("a")
    targets.settle_s = 60.0
    with pytest.raises(Unavailable, match="no verifier of model 'b' has reported yet") as refused:
        targets.named("b")
    assert refused.value.retry_after_ms
    assert targets.named("a").info.name == "a"


def test_a_name_that_an_operator_gave_is_never_unknown() -> None:
    for name, given in {"large": {"aliases": "large=b"}, "gpt": {"served": "gpt", "default": "b"}}.items():
        for model in (name, "b") if "default" in given else (name,):
            with pytest.raises(Unavailable, match="has reported yet"):
                known("a", **given).named(model)


async def test_requests_wait_for_their_target() -> None:
    targets = known("a")
    targets.settle_s = 60.0
    waiting = [asyncio.create_task(targets.find("b")) for _ in range(_MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(30):
            await targets.find("b")  # one too many waits no minute
    assert (await targets.find("a")).info.name == "a"
    assert not any(task.done() for task in waiting)
    targets.add(target("b"), lambda _: [1])
    assert {found.info.name for found in await asyncio.gather(*waiting)} == {"b"}


async def test_requests_wait_no_longer_than_they_may() -> None:
    targets = known("a")
    targets.settle_s = 60.0
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable):
            await targets.find("b", 0.01)
        targets.settle_s = 0.01
        with pytest.raises(NotFound):
            await targets.find("b")


def test_aliases_are_listed_once_their_target_is_there() -> None:
    targets = known("a", aliases=" quick = a , large=b")
    assert list(targets.listed()) == ["a", "quick"]
    assert targets.named("quick") is targets.named("a")
    targets.add(target("b"), lambda _: [1])
    assert targets.named("large").info.name == "b"


def test_a_targets_own_name_precedes_an_alias() -> None:
    assert known("a", "b", aliases="b=a").named("b").info.name == "b"


def test_the_served_name_is_the_defaults() -> None:
    targets = known("a", "b", served="gpt", aliases="x=a,y=gpt")
    assert list(targets.listed()) == ["gpt", "b", "x", "y"]
    assert {targets.named(name).info.name for name in ("", "gpt", "x", "y")} == {"a"}
    with pytest.raises(NotFound):
        targets.named("a")
    named = known("a", "b", served="gpt", default="b")
    assert (named.named("gpt").info.name, named.named("a").served_name) == ("b", "a")


@pytest.mark.parametrize("aliases", ["a", "a=", "=b", "a=b,c"])
def test_aliases_of_another_form_are_refused(aliases: str) -> None:
    with pytest.raises(StartupError, match="alias"):
        ModelNames.read("", "", aliases)


def test_a_new_target_replaces_those_without_verifiers() -> None:
    targets = known("a")
    targets.add(target("b"), lambda _: [])
    assert list(targets.listed()) == ["b"]
    assert targets.of("a") is None


def test_another_one_of_the_same_name_takes_the_place() -> None:
    targets = known("a", "b")
    targets.add(target("a", "a2"), lambda identity: [1] * (identity == "b"))
    assert targets.named("").identity == "a2"
    assert list(targets.listed()) == ["a", "b"]
    assert targets.of("a") is None


def test_targets_are_limited() -> None:
    targets = known(*(f"t{number}" for number in range(MAX_TARGETS)))
    with pytest.raises(Overloaded, match="targets are served"):
        targets.check_room(lambda _: [1])
    targets.check_room(lambda identity: [1] * (identity != "t3"))
