"""Fit of workers and targets: a verifier serves one target, a drafter every one that it was made for."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.workers.target import Target
from outrider.protocol.errors import ModelMismatch
from outrider.protocol.fleet import ModelInfo, WorkerInfo


def fits(drafter: ModelInfo, target: ModelInfo) -> bool:
    """Return whether a drafter's guesses can hold for a target. An empty digest stands for any."""
    return shares_vocabulary(drafter, target) and drafter.target_digest in ("", target.weights_digest)


def shares_vocabulary(drafter: ModelInfo, target: ModelInfo) -> bool:
    own, size = drafter.vocabulary_digest, drafter.vocab_size
    return own == target.vocabulary_digest if own else size in (0, target.vocab_size or size)


def check_drafter(drafter: ModelInfo, targets: Iterable[Target]) -> None:
    """Raise ModelMismatch for a drafter that fits none of the targets, if there are any."""
    known = [target.info for target in targets]
    if not known or any(fits(drafter, target) for target in known):
        return
    alike = [target for target in known if shares_vocabulary(drafter, target)]
    names = ", ".join(target.name for target in alike or known)
    if not alike:
        raise ModelMismatch(f"drafter {drafter.name} has another vocabulary than target {names}")
    raise ModelMismatch(
        f"drafter {drafter.name} was trained for another target than {names}: its guesses would fail. Train "
        "one for this target with `outrider train`",
        field="model.target_digest",
        value=drafter.target_digest,
        limit=", ".join(target.weights_digest for target in alike),
    )


def target_mismatch(known: Target, info: WorkerInfo) -> ModelMismatch:
    """Return the error of a verifier whose target has the name of another one."""
    ours, theirs = known.info, info.model
    for key in "architecture", "vocab_size", "vocabulary_digest", "eos_token_ids", "dtype", "parameters", "fingerprint":
        if (mine := getattr(ours, key)) != (other := getattr(theirs, key)):
            return ModelMismatch(
                f"verifier {info.worker_id} serves {theirs.name}, the others {ours.name}; first difference: "
                f"{key} is {other}, must be {mine}",
                field=f"model.{key}",
                value=other,
                limit=mine,
            )
    return ModelMismatch(f"verifier {info.worker_id} serves another target")
