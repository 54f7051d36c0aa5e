"""Execution of a step in the engine's thread: one forward pass for the batch, then each session's verification."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import torch

from outrider.engine import Engine, StepResult
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.speculation.grammar import Masks
from verifier.batching import ScheduledSession
from verifier.verify import VerifyResult, argmax_per_session, verify

log = structlog.get_logger(__name__)

_MASK_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class SessionResult:
    """Result of a step for one session."""

    verified: VerifyResult | None  # None: a prompt chunk, or an error
    hidden_states: torch.Tensor | None  # of consecutive positions, in wire format  # [tokens, width]
    complete_after: int | None = None  # number of verified tokens after which the grammar is complete
    error: OutriderError | None = None  # ends the session


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Results of a step in the order of its batch."""

    results: list[SessionResult]
    forward_us: int
    step_us: int

    @property
    def num_committed(self) -> int:
        return sum(len(result.verified.tokens) for result in self.results if result.verified is not None)


class StepExecutor:
    """Executor of steps. Grammar masks are computed by threads of their own during the forward pass."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mask_threads = ThreadPoolExecutor(max_workers=_MASK_THREADS, thread_name_prefix="masks")

    def run(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        started = time.perf_counter()
        masks = [self._compute_mask(item) for item in batch]
        computed = self._engine.extend([item.engine_tokens() for item in batch])
        forward = time.perf_counter()
        argmax = argmax_per_session(computed, [item.session.params for item in batch if item.verifies])
        results: list[SessionResult] = []
        for index, item in enumerate(batch):
            try:
                results.append(self._session_result(item, computed, index, argmax[index], masks[index]))
            except InvalidRequest as error:  # in its grammar: the other sessions are not affected
                log.info("grammar failed, session ended", session=item.session.id, error=error.message)
                results.append(SessionResult(None, None, error=error))
        finished = time.perf_counter()
        return VerifyStep(results, int((forward - started) * 1e6), int((finished - started) * 1e6))

    def close(self) -> None:
        self._mask_threads.shutdown(wait=True)

    def _compute_mask(self, item: ScheduledSession) -> Future[Masks] | None:
        """Start the computation of the tokens that the grammar allows at each row."""
        guide = item.session.guide
        if guide is None or not item.verifies:
            return None
        return self._mask_threads.submit(guide.allowed, item.block.paths, self._engine.info.vocab_size)

    def _session_result(
        self,
        item: ScheduledSession,
        computed: StepResult,
        index: int,
        argmax: Sequence[int],
        mask: Future[Masks] | None,
    ) -> SessionResult:
        session = item.session
        if not item.verifies:
            return SessionResult(None, item.kept_hidden_states(computed.hidden_states[index], ()))
        verified = verify(
            computed.logits[index],
            item.block,
            len(session.committed),
            session.params,
            session.history,
            session.chance,
            argmax,
            None if mask is None else mask.result(),
        )
        path = verified.outcome.path
        complete_after = None if session.guide is None else session.guide.advance(verified.tokens)
        last = len(item.pending) - 1
        self._engine.compact(session.key, session.cache_length, (*range(last + 1), *(last + row for row in path)))
        return SessionResult(verified, item.kept_hidden_states(computed.hidden_states[index], path), complete_after)
