"""Which drafters fit the targets of a fleet, and what one that fits none is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.workers.target import Target
from coordinator.workers.targets.fit import check_drafter, fits
from outrider.protocol.errors import ModelMismatch
from outrider.protocol.fleet import ModelInfo

NOTHING: Any = None
SMALL = ModelInfo("small", "s", vocabulary_digest="words", weights_digest="ws")
LARGE = ModelInfo("large", "l", vocabulary_digest="words", weights_digest="wl")
OTHER = ModelInfo("other", "o", vocabulary_digest="signs", weights_digest="wo")
TARGETS = [Target(info, NOTHING, NOTHING, NOTHING, info.fingerprint) for info in (SMALL, LARGE, OTHER)]


def drafter(vocabulary: str = "", target: str = "") -> ModelInfo:
    return ModelInfo("d", "d", vocabulary_digest=vocabulary, target_digest=target)


@pytest.mark.parametrize(
    ("given", "fitting"),
    [
        (drafter(), "small large other"),
        (drafter("words"), "small large"),
        (drafter("signs"), "other"),
        (drafter("words", "wl"), "large"),
        (drafter("", "wo"), "other"),
        (drafter("words", "wo"), ""),
        (drafter("none"), ""),
    ],
)
def test_drafters_find_their_targets_by_digest(given: ModelInfo, fitting: str) -> None:
    assert [info.name for info in (SMALL, LARGE, OTHER) if fits(given, info)] == fitting.split()
    check_drafter(given, [])
    if fitting:
        check_drafter(given, TARGETS)
    else:
        with pytest.raises(ModelMismatch):
            check_drafter(given, TARGETS)


def test_a_drafter_without_a_vocabulary_may_know_how_many_ids_it_has() -> None:
    """As a published one: it would guess ids that the target lacks, or fail on those that it lacks itself."""
    sized = [replace(SMALL, vocab_size=100), replace(OTHER, vocab_size=120)]
    known = [Target(info, NOTHING, NOTHING, NOTHING, info.fingerprint) for info in sized]
    given = replace(drafter(), vocab_size=120)
    assert [fits(given, info) for info in (*sized, SMALL)] == [False, True, True]
    assert fits(replace(drafter("words"), vocab_size=120), sized[0]), "the digest decides"
    check_drafter(given, known)
    with pytest.raises(ModelMismatch, match=r"^drafter d has another vocabulary than target small$"):
        check_drafter(given, known[:1])


def test_one_that_fits_no_target_is_told_why() -> None:
    with pytest.raises(ModelMismatch, match=r"^drafter d has another vocabulary than target small$"):
        check_drafter(drafter("signs"), TARGETS[:1])
    with pytest.raises(ModelMismatch, match="drafter d was trained for another target than small: its") as refused:
        check_drafter(drafter("words", "wl"), TARGETS[:1])
    assert (refused.value.field, refused.value.value, refused.value.limit) == ("model.target_digest", "wl", "ws")
    with pytest.raises(ModelMismatch, match="another target than small, large: its"):
        check_drafter(drafter("words", "wo"), TARGETS)
