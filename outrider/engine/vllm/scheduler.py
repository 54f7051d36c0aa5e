"""vLLM's scheduler (its setting `scheduler_cls`) with the guesses of a planned step; other sessions wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from outrider.engine.vllm.messages import EXTRA, Computed, Plan, StepMasks, extra

# The tokens that a session's grammar allows after each of these guesses; None: it has no grammar.
Masks = Callable[[str, Sequence[int]], npt.NDArray[np.bool_] | None]


class SilentScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler without guesses of its own drafter."""

    num_spec_tokens: int

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        most, self.num_spec_tokens = self.num_spec_tokens, 0  # vLLM would pad requests with one new token to it
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.num_spec_tokens = most


class GuessingScheduler(SilentScheduler):
    """`plan` and `masks` are set before each step; `computed` is read after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan: Plan = {}
        self.masks: Masks = lambda request, guesses: None
        self.computed: dict[str, Computed] = {}
        self.cached_prefix: dict[str, int] = {}  # tokens found in the prefix index, by new request
        self.at_most_cached: dict[str, int] = {}  # tokens that a new request may find there
        self._find_prefix = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._computed_blocks

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self.running:
            planned = self.plan.get(request.request_id)
            request.spec_token_ids = list(planned.guesses) if planned is not None and decodes(request) else []
        # vLLM begins none behind the first that must wait.
        unplanned = [request for request in self.waiting if request.request_id not in self.plan]
        self.waiting.remove_requests(unplanned)
        for request in unplanned:
            self.waiting.add_request(request)
        output = super().schedule(*args, **kwargs)
        setattr(output, EXTRA, {name: self.plan[name] for name in output.num_scheduled_tokens if name in self.plan})
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of the tokens of a request the plan allows in this step; 0: it waits."""
        planned = self.plan.get(request.request_id)
        if request.status is not RequestStatus.RUNNING:
            self.cached_prefix.setdefault(request.request_id, num_computed_tokens)
        if planned is not None:
            return min(num_new_tokens, planned.num_tokens)
        if request.status is RequestStatus.RUNNING:
            return 0
        # A preempted request comes back as there is room. Nothing is drawn for it until it is planned.
        uncached: int = request.num_tokens - 1 - num_computed_tokens
        return max(0, min(num_new_tokens, uncached))

    def _computed_blocks(self, request: Request) -> tuple[Any, int, int]:
        """Return what vLLM finds of a request in its cache, of no more tokens than the session may take from there."""
        at_most, manager = self.at_most_cached.get(request.request_id, request.num_tokens), self.kv_cache_manager
        limited = at_most < request.num_tokens and request.status is not RequestStatus.PREEMPTED
        if not limited or not manager.prefix_cache_lookup_enabled(request):
            return self._find_prefix(request)  # type: ignore[no-any-return]
        blocks, count, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, at_most)
        return manager.create_kv_cache_blocks(blocks), count, 0

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> StepMasks | None:
        """Return the masks of the step's rows. vLLM asks after the forward pass has begun."""
        packed = {}
        vocab_size = 0
        for name in scheduler_output.num_scheduled_tokens:
            if self.requests[name].is_prefill_chunk:
                continue
            allowed = self.masks(name, scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            if allowed is not None:
                packed[name] = np.packbits(allowed, axis=-1)
                vocab_size = allowed.shape[-1]
        return StepMasks(packed, vocab_size) if packed else None

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self.computed = dict.fromkeys(scheduler_output.num_scheduled_tokens, Computed()) | extra(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)


def decodes(request: Request) -> bool:
    """Return whether all tokens of a request are computed but the last."""
    return bool(request.num_computed_tokens == request.num_tokens - 1)
