"""Seeds of the noise that workers draw with under rejection and block: of each worker its own, of each session its own.

Greedy and coupled texts are functions of the request's seed, and every worker
is told that seed. The other two rules need noise that nothing guessed depends
on. A request's seed may come again while a drafter remembers what it led to,
so a session draws a nonce when it begins; its record keeps it. An epoch later
a coordinator may have lost tokens that a drafter was told, so the epoch is
mixed in. The digest keeps a drafter from computing the verifier's noise.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from coordinator.persistence.session_record import SessionRecord
from outrider.protocol.sampling_params import SamplingParams

_NONCE_BYTES = 16
_SEED_BYTES = 8


def draw_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def verifier_params(record: SessionRecord) -> SamplingParams:
    """Return the request's parameters with the seed that a verifier is told."""
    return _seeded(record, "verifier")


def drafter_params(record: SessionRecord, source: int) -> SamplingParams:
    """Return the request's parameters with the seed that the drafter of this source is told."""
    return _seeded(record, f"drafter {source}")


def _seeded(record: SessionRecord, role: str) -> SamplingParams:
    params, nonce = record.request.params, record.request.nonce
    if not params.mode.needs_draft_probs:
        return params
    mixed = blake2b(f"{params.seed} {nonce} {record.epoch} {role}".encode(), digest_size=_SEED_BYTES)
    return params.with_seed(int.from_bytes(mixed.digest(), "big"))
