"""Which drafters fit the targets of a fleet, and what one that fits none is told."""

from __future__ import annotations

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


def test_one_that_fits_no_target_is_told_why() -> None:
    with pytest.raises(ModelMismatch, match=r"^drafter d has another vocabulary than target small$"):
        check_drafter(drafter("signs"), TARGETS[:1])
    with pytest.raises(ModelMismatch, match="drafter d was trained for another target than small: its") as refused:
        check_drafter(drafter("words", "wl"), TARGETS[:1])
    assert (refused.value.field, refused.value.value, refused.value.limit) == ("model.target_digest", "wl", "ws")
    with pytest.raises(ModelMismatch, match="another target than small, large: its"):
        check_drafter(drafter("words", "wo"), TARGETS)
