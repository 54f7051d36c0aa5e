"""Seeds of the workers' noise under rejection and block verification, drawn anew for each stream to a worker.

Greedy and coupled texts are functions of the request's seed, which every worker receives. The other two rules need
noise that no guess depends on. A drafter may remember tokens that the record lacks: of an earlier request with the same
seed, of a session that was taken over, or, in the verifier's process, of verdicts that were lost with their stream.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from outrider.protocol.sampling_params import SamplingParams


def worker_params(params: SamplingParams) -> SamplingParams:
    """Return a request's parameters for one stream to a worker."""
    return replace(params, seed=secrets.randbits(64)) if params.mode.needs_draft_probs else params
