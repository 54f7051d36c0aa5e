"""Grammar masks of a step on vLLM: a session's matcher serves one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.engine.mock import MockEngine
from outrider.engine.vllm.messages import Computed
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess
from outrider.speculation.grammar import Masks
from verifier.batching import ScheduledSession
from verifier.session import VerifyOpening, VerifySession
from verifier.vllm_target import VllmTarget

PROMPT = (1, 2, 3, 4)


class SlowMatcher:
    """A matcher that takes its time, as one of a large grammar does."""

    def __init__(self) -> None:
        self.calls = 0
        self._busy = threading.Lock()

    @property
    def busy(self) -> bool:
        return self._busy.locked()

    def allowed(self, paths: Sequence[Sequence[int]], vocab_size: int) -> Masks:
        self.calls += 1
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("Already borrowed")
        time.sleep(0.1)
        self._busy.release()
        return np.ones((len(paths), vocab_size), dtype=np.bool_)


class Core:
    """vLLM's core, as far as a target sees it: it asks for the masks of some requests."""

    block_tokens = 16
    evictable_tokens = 0
    layers = ()
    state_shape = (0, 64)
    state_device = torch.device("cpu")

    def __init__(self) -> None:
        self.asks = False
        self.masks: list[Masks | None] = []
        self.scheduler = SimpleNamespace(computed={}, cached_prefix={})

    def add(self, name: str, *_: Any) -> None:
        self.scheduler.computed[name] = Computed()

    def step(self, plan: dict[str, Any], masks: Any) -> None:
        if self.asks:
            self.masks = [masks(name, planned.guesses) for name, planned in plan.items()]

    def num_computed(self, name: str) -> int:
        return 2

    def close(self) -> None:
        return None


def scheduled(matcher: SlowMatcher) -> VerifySession:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=8)
    opening = VerifyOpening("one", 1, PROMPT, len(PROMPT), params)
    return VerifySession(opening, MockEngine().info, torch.device("cpu"), matcher)  # type: ignore[arg-type]


def item(session: VerifySession, *, verifies: bool) -> ScheduledSession:
    return ScheduledSession(session, PROMPT[:2], Guess(len(PROMPT), 0, 0, ()), verifies)


def test_a_matcher_is_left_alone_by_a_prompt_chunk_and_after_each_step() -> None:
    """A mask that nobody waits for would be computed beside the next one."""
    core, matcher = Core(), SlowMatcher()
    target = VllmTarget(core, MockEngine().info)  # type: ignore[arg-type]
    session = scheduled(matcher)
    target.step([item(session, verifies=False)])
    assert matcher.calls == 0
    target.step([item(session, verifies=True)])
    assert matcher.calls == 1
    assert not matcher.busy
    core.asks = True
    target.step([item(session, verifies=True)])
    target.step([item(session, verifies=False)])  # vLLM has found the rest of the prompt in its cache
    assert matcher.calls == 3
    assert core.masks[0] is not None
    assert core.masks[0].shape == (1, MockEngine().info.vocab_size)
    target.close()
