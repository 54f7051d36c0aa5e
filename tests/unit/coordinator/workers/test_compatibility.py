"""Which verifiers serve one target, and when a target is known anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.workers.compatibility import Compatibility
from coordinator.workers.fleet_keys import FleetKeys
from coordinator.workers.target import Target
from coordinator.workers.targets.known_targets import KnownTargets
from outrider.protocol.errors import ModelMismatch
from outrider.protocol.fleet import ModelInfo, Role, WorkerInfo

NOTHING: Any = None
FIRST = WorkerInfo("first", Role.VERIFIER, "127.0.0.1:1", ModelInfo("m", "f", text_digest="t", eos_token_ids=(2,)))
MENDED = replace(FIRST, worker_id="mended", model=replace(FIRST.model, eos_token_ids=(2, 7)))


def test_other_end_tokens_are_another_target() -> None:
    """Its generation_config.json was put right: to take its sessions for those of the old one fails each of them."""
    present: list[WorkerInfo] = []
    targets = KnownTargets()
    checks = Compatibility(FleetKeys(), targets, lambda _: present)
    assert checks.check(FIRST)
    targets.add(Target(FIRST.model, NOTHING, NOTHING, NOTHING, checks.identity(FIRST.model)), lambda _: present)
    present.append(FIRST)
    assert not checks.check(replace(FIRST, worker_id="second"))
    with pytest.raises(ModelMismatch, match=r"eos_token_ids is \(2, 7\), must be \(2,\)"):
        checks.check(replace(MENDED, model=replace(MENDED.model, dtype="bfloat16")))
    other = replace(MENDED.model, architecture="qwen3", vocab_size=151_936, text_digest="", fingerprint="g")
    with pytest.raises(ModelMismatch, match="first difference: architecture"):
        checks.check(replace(MENDED, model=other))
    present.clear()
    assert checks.check(MENDED)
