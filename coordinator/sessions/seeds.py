"""Seeds of the workers' noise under rejection and block verification, distinct per session and worker.

Greedy and coupled texts are functions of the request's seed, which every worker receives. The other two rules need
noise that no guess depends on. A seed may be used again while a drafter still has the tokens it led to, so each session
draws a nonce and stores it in its record. After a takeover, tokens that a drafter has seen may be lost, so the epoch is
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
    """Return the request's parameters with the verifier's seed."""
    return _seeded(record, "verifier")


def drafter_params(record: SessionRecord, source: int) -> SamplingParams:
    """Return the request's parameters with the seed of the drafter with this source number."""
    return _seeded(record, f"drafter {source}")


def _seeded(record: SessionRecord, role: str) -> SamplingParams:
    params, nonce = record.request.params, record.request.nonce
    if not params.mode.needs_draft_probs:
        return params
    mixed = blake2b(f"{params.seed} {nonce} {record.epoch} {role}".encode(), digest_size=_SEED_BYTES)
    return params.with_seed(int.from_bytes(mixed.digest(), "big"))
