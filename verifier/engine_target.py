"""The target on one of Outrider's own engines: one forward pass for the batch, then each session's verification."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import structlog
import torch

from outrider.engine import Engine
from outrider.engine.paged.block_manager import BLOCK_TOKENS
from outrider.protocol.errors import InvalidRequest
from outrider.speculation.grammar import Masks
from outrider.speculation.verification import SessionSampling, VerifyResult, verify_batch
from verifier.batching import ScheduledSession
from verifier.hidden_states.projections import Projections
from verifier.hidden_states.step_states import KeptRows, SentRows, wire_states
from verifier.session import VerifySession
from verifier.target import SessionResult, TargetFailed, VerifyStep

log = structlog.get_logger(__name__)

MASK_THREADS = min(4, os.cpu_count() or 1)


class EngineTarget:
    """A VerifyTarget on an Engine. Grammar masks are computed by threads of their own during the forward pass."""

    block_tokens = BLOCK_TOKENS
    verifies_trees = True

    def __init__(self, engine: Engine) -> None:
        self.info, self.device = engine.info, engine.device
        self._engine = engine
        self.projections = Projections(engine.state_shape, engine.device)
        self._mask_threads = ThreadPoolExecutor(max_workers=MASK_THREADS, thread_name_prefix="masks")

    @property
    def evictable_tokens(self) -> int:
        return self._engine.evictable_tokens

    def match_prefix(self, session: VerifySession, at_most: int) -> None:
        length = self._engine.match_prefix(session.key, session.committed[: at_most + 1], session.cache_salt)
        session.cache_length = session.num_cached_tokens = length

    def step(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        try:
            return self._step(batch)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            # An error of the device is sticky: later steps would fail as well.
            raise TargetFailed(f"the device failed: {error}") from error

    def free(self, session: VerifySession) -> None:
        self._engine.free(session.key)

    def close(self) -> None:
        self._mask_threads.shutdown(wait=True)

    def _step(self, batch: Sequence[ScheduledSession]) -> VerifyStep:
        started = time.perf_counter()
        masks = [self._compute_mask(item) for item in batch]
        computed = self._engine.extend([item.engine_tokens() for item in batch])
        forward = time.perf_counter()
        sessions: dict[int, SessionSampling] = {}  # by index in the batch
        failed: dict[int, InvalidRequest] = {}
        for index, (item, mask) in enumerate(zip(batch, masks, strict=True)):
            try:
                if item.verifies:
                    allowed = None if mask is None else mask.result()
                    session = item.session
                    sessions[index] = SessionSampling(session.params, session.history, session.chance, allowed)
            except InvalidRequest as error:  # in its grammar: the other sessions are not affected
                failed[index] = error
        blocks = [batch[index].block for index in sessions]
        firsts = list(accumulate(computed.counts, initial=0))
        rows = [firsts[index] for index in sessions]
        outcomes = verify_batch(computed.all_logits, blocks, list(sessions.values()), rows)
        verified = dict(zip(sessions, outcomes, strict=True))
        sent: list[SentRows] = [{} for _ in batch]
        if any(item.states for item in batch):
            paths = [verified[index].outcome.path if index in verified else () for index in range(len(batch))]
            kept = [KeptRows(item.states, item.kept_rows(path)) for item, path in zip(batch, paths, strict=True)]
            sent = wire_states(computed, kept, self.projections.find)
        found: dict[int, VerifyResult | InvalidRequest] = {**verified, **failed}
        results = [self._session_result(item, sent[n], found.get(n)) for n, item in enumerate(batch)]
        return VerifyStep(results, int((forward - started) * 1e6), int((time.perf_counter() - started) * 1e6))

    def _compute_mask(self, item: ScheduledSession) -> Future[Masks] | None:
        """Start the computation of the tokens that the grammar allows at each row."""
        guide = item.session.guide
        if guide is None or not item.verifies:
            return None
        return self._mask_threads.submit(guide.allowed, item.block.paths, self.info.vocab_size)

    def _session_result(
        self, item: ScheduledSession, hidden_states: SentRows, found: VerifyResult | InvalidRequest | None
    ) -> SessionResult:
        session = item.session
        cache_length = session.cache_length + len(item.pending)
        if found is None:
            return SessionResult(None, hidden_states, cache_length)
        try:
            if isinstance(found, InvalidRequest):
                raise found
            complete_after = None if session.guide is None else session.guide.advance(found.tokens)
        except InvalidRequest as failure:
            log.info("grammar failed, session ended", session=session.id, error=failure.message)
            return SessionResult(None, {}, session.cache_length, error=failure)
        path = found.outcome.path
        if item.block.tokens:
            self._engine.compact(session.key, session.cache_length, item.kept_rows(path))
        return SessionResult(found, hidden_states, cache_length + len(path), complete_after=complete_after)
