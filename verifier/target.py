"""The seam between the verification loop and the target model: what goes into a step, and what came of it.

Sessions, guess trees, waiting, admission, stops and verdicts lie on the loop's side. Behind the seam stand Outrider's
own engines (`engine_target`) and vLLM (`vllm_target`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from outrider.protocol.errors import OutriderError
from outrider.protocol.fleet import ModelInfo
from outrider.speculation.verification import VerifyResult
from verifier.batching import ScheduledSession
from verifier.hidden_states.projections import Projections
from verifier.hidden_states.step_states import SentRows
from verifier.session import VerifySession


class TargetFailed(Exception):
    """The target cannot compute any more: the process must end, so that its sessions move to another verifier."""


class SessionResult(NamedTuple):
    """Result of a step for one session."""

    verified: VerifyResult | None  # None: a prompt chunk, or an error
    hidden_states: SentRows  # of consecutive positions, in wire format
    cache_length: int  # tokens in the cache after the step, accepted guesses among them
    num_cached_tokens: int | None = None  # found in the prefix index, in a session's first step
    complete_after: int | None = None  # number of verified tokens after which the grammar is complete
    error: OutriderError | None = None  # ends the session


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Results of a step in the order of its batch."""

    results: list[SessionResult]
    forward_us: int
    step_us: int


class VerifyTarget(Protocol):
    """A model with the KV caches of many sessions. `step` runs in a thread of its own, the rest between steps."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def device(self) -> torch.device:
        """Return the device of sampling state that the session holds."""

    @property
    def block_tokens(self) -> int:
        """Return the unit in which a session takes KV cache."""

    @property
    def evictable_tokens(self) -> int:
        """Return the capacity that evictable cached blocks occupy, in tokens."""

    @property
    def verifies_trees(self) -> bool:
        """Return whether a block of guesses may branch. False: only chains."""

    @property
    def projections(self) -> Projections:
        """Return the projections of hidden states that it applies."""

    def match_prefix(self, session: VerifySession, at_most: int) -> None:
        """Begin a new session from cached blocks of so many tokens at most, now or in its first step."""

    def step(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        """Compute a batch and verify its guesses; others wait. Raise TargetFailed where no further step can succeed."""

    def free(self, session: VerifySession) -> None:
        """Release a session's cache; unknown sessions are accepted."""

    def close(self) -> None:
        """Release threads and processes."""
