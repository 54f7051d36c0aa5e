"""Installation of the judge in vLLM's two model runners.

The older runner reads the guesses from the scheduler's message. The newer one
reads only their number there, and the tokens from a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.engine.vllm.judge import Judge, StepRows, padded
from outrider.engine.vllm.messages import PADDING


class JudgingWorker:
    """Extension of vLLM's worker class, which takes it by its setting `worker_extension_cls`."""

    model_runner: Any

    def install_judge(self) -> str:
        """Replace vLLM's draws and acceptance; return which runner it has."""
        runner = self.model_runner
        alone = runner.vllm_config.parallel_config.world_size == 1
        judge = Judge(runner.model_config.get_vocab_size(), runner.device, alone=alone)
        if hasattr(runner, "req_states"):
            _NewRunner(runner, judge)
            return "v2"
        _OldRunner(runner, judge)
        return "v1"


class _Runner:
    """The common part: each step begins with the scheduler's message, and ends with ours on its output."""

    def __init__(self, runner: Any, judge: Judge) -> None:
        self._runner = runner
        self._judge = judge
        self._hidden_states: Sequence[torch.Tensor] = ()  # the final ones, and those after each captured layer
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        runner.execute_model = self.execute_model
        runner.sample_tokens = self.sample_tokens

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._judge.begin(scheduler_output)
        return self._execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, masks: Any) -> Any:
        self._judge.masks = masks
        state = self._runner.execute_model_state
        if state is not None and state.hidden_states is not None:
            self._hidden_states = (state.hidden_states, *(state.aux_hidden_states or ()))
        output = self._sample_tokens(None)
        self._hidden_states = ()
        return output if output is None else self._judge.finish(output)


class _OldRunner(_Runner):
    def __init__(self, runner: Any, judge: Judge) -> None:
        super().__init__(runner, judge)
        runner._sample = self.sample
        silence_drafter(runner)

    def sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        runner = self._runner
        requests = runner.input_batch.req_ids
        rows = [1] * len(requests)
        if spec_decode_metadata is not None:
            rows = [1 + number for number in spec_decode_metadata.num_draft_tokens]
        whole = [not chunk for chunk in runner.discard_request_mask.np[: len(requests)]]
        starts = runner.query_start_loc.np[: len(requests)].tolist()
        committed = self._judge.verify(logits, self._hidden_states, StepRows(requests, rows, whole, starts))
        return SamplerOutput(padded(committed, max(rows), torch.int32, logits.device), None)


class _NewRunner(_Runner):
    def __init__(self, runner: Any, judge: Judge) -> None:
        super().__init__(runner, judge)
        self._width = runner.num_speculative_steps
        # The sampler holds state that the runner reads, so it stays, with another call.
        calls = {"__call__": lambda sampler, logits, batch: self.sample(logits, batch)}
        runner.sampler.__class__ = type("JudgingSampler", (type(runner.sampler),), calls)
        runner.rejection_sampler = lambda logits, batch, *args, **kwargs: self.sample(logits, batch)
        silence_drafter(runner)

    def sample(self, logits: torch.Tensor, batch: Any) -> Any:
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        ends = batch.cu_num_logits_np
        whole = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        layout = StepRows(
            batch.req_ids, (ends[1:] - ends[:-1]).tolist(), whole.tolist(), batch.query_start_loc_np[:-1].tolist()
        )
        committed = self._judge.verify(logits, self._hidden_states, layout)
        width = 1 if batch.num_draft_tokens == 0 else self._width + 1
        counts = torch.tensor([max(1, len(tokens)) for tokens in committed], dtype=torch.int32, device=logits.device)
        counts, rejected = get_num_sampled_and_rejected(
            counts, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, self._runner.req_states.prefill_len.gpu
        )
        return SamplerOutput(padded(committed, width, torch.int64, logits.device), None, None, counts, rejected)


def silence_drafter(runner: Any) -> None:
    """Put guesses of a step in the place of those of vLLM's own drafter, which is there only to make room for them."""
    if not hasattr(runner, "req_states"):
        runner._input_fits_in_drafter = lambda metadata: True
        runner.propose_draft_token_ids = lambda *args, **kwargs: [[] for _ in runner.input_batch.req_ids]
        return
    runner.speculator = _NoSpeculator(runner)
    execute_model = runner.execute_model

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        _place_guesses(runner, scheduler_output)
        return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = execute


def _place_guesses(runner: Any, scheduler_output: Any) -> None:
    """Write the guesses of a step where the newer runner reads them."""
    guesses = scheduler_output.scheduled_spec_decode_tokens
    if guesses:
        states, width = runner.req_states, runner.num_speculative_steps
        slots = [states.req_id_to_index[name] for name in guesses]
        tokens = padded(list(guesses.values()), width, states.draft_tokens.dtype, runner.device)
        states.draft_tokens[torch.tensor(slots, device=runner.device)] = tokens


class _NoSpeculator:
    """A speculator without guesses, in place of vLLM's own."""

    draft_logits = None
    supports_mm_inputs = False

    def __init__(self, runner: Any) -> None:
        shape = (runner.max_num_reqs, runner.num_speculative_steps)
        self._nothing = torch.full(shape, PADDING, dtype=torch.int64, device=runner.device)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._nothing[: input_batch.num_reqs]
