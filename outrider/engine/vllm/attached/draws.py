"""Verification in vLLM's workers by vLLM's own draws: a guess is accepted if vLLM draws the same token there.

The text is that of the same server without guesses, for a greedy request and for one with a seed. A request without a
seed has the same distribution. vLLM's own rejection sampler promises only the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from outrider.engine.vllm.runners import silence_drafter


def install(worker: Any) -> str:
    """Replace the verification of a worker's model runner; return which runner it is."""
    runner = worker.model_runner
    silence_drafter(runner)
    verifies = getattr(runner, "rejection_sampler", None) is not None  # no stage of a pipeline but the last
    if not hasattr(runner, "req_states"):
        if verifies:
            runner.rejection_sampler = OwnDraws(runner.sampler)
        if (budgets := runner.input_batch.thinking_budget_state_holder) is not None:
            budgets.in_spec_mode = False  # in each step the sampler gets one row for each request, as without guesses
        return "v1"
    if verifies:
        runner.rejection_sampler._verify = OwnDrawsOfNewRunner(runner.sampler, runner.num_speculative_steps)
    return "v2"


class OwnDraws:
    """Rejection sampler of the older runner, whose noise is a generator's state.

    So it draws position after position, and only while guesses are accepted: exactly the draws of plain steps.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        counts: list[int] = metadata.num_draft_tokens
        firsts = list(accumulate((1 + count for count in counts), initial=0))[:-1]
        guesses = [each.tolist() for each in metadata.draft_token_ids.cpu().split(counts)]
        committed: list[list[int]] = [[] for _ in counts]
        logprobs = None
        going, depth = list(range(len(counts))), 0
        while going:
            rows = torch.tensor([firsts[request] + depth for request in going], device=logits.device)
            drawn = self._sampler(logits=logits[rows], sampling_metadata=_of(sampling, going, committed, depth))
            if depth == 0:
                logprobs = drawn.logprobs_tensors
            for request, (token,) in zip(going, drawn.sampled_token_ids.tolist(), strict=True):
                committed[request].append(token)
            going = [each for each in going if depth < counts[each] and committed[each][depth] == guesses[each][depth]]
            depth += 1
        if logprobs is not None:  # of requests without guesses; vLLM reads as many rows as it has room for tokens
            places = torch.arange(len(counts), device=logits.device)
            logprobs = logprobs.filter(places.repeat_interleave(depth))
        padded = [[*tokens, *[-1] * (depth - len(tokens))] for tokens in committed]
        return SamplerOutput(torch.tensor(padded, dtype=torch.int32, device=logits.device), logprobs)


def _of(sampling: Any, members: Sequence[int], committed: Sequence[Sequence[int]], depth: int) -> Any:
    """Return vLLM's sampling metadata after the tokens of this step, of requests that are `drawn_alike`."""
    if depth == 0:
        return sampling
    from vllm.v1.sample.logits_processor import LogitsProcessors

    index = torch.tensor(members, device=sampling.frequency_penalties.device)
    outputs, seeds = sampling.output_token_ids, sampling.generators
    tensors = ("temperature", "top_p", "top_k", "prompt_token_ids")
    penalties = ("frequency_penalties", "presence_penalties", "repetition_penalties")
    return replace(
        sampling,
        **{name: values[index] for name in (*tensors, *penalties) if (values := getattr(sampling, name)) is not None},
        generators={place: seeds[member] for place, member in enumerate(members) if member in seeds},
        output_token_ids=[] if sampling.no_penalties else [[*outputs[each], *committed[each]] for each in members],
        max_num_logprobs=None,
        logprob_token_ids=None,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=None,
        thinking_budget_state_holder=None,
    )


class OwnDrawsOfNewRunner:
    """Verification of the newer runner, whose noise is a function of seed and position: all rows are drawn at once."""

    def __init__(self, sampler: Any, num_guesses: int) -> None:
        self._sampler = sampler
        self._width = num_guesses + 1

    def __call__(self, logits: Any, draft_logits: Any, inputs: Any, pos: Any, bounds: Any, *layout: Any) -> Any:
        """Return adjusted logits, tokens by request and their numbers, as vLLM's own method does."""
        requests, requests_np, expanded, local_pos, lengths, guessed = layout
        given = (logits, expanded, requests, requests_np, pos, inputs, local_pos, lengths)
        drawn, adjusted = self._sampler.sample(*given, return_logprobs=True)  # else they may lack top-k and top-p
        return adjusted, *walk(drawn, guessed, bounds, self._width)


def walk(
    drawn: torch.Tensor, guessed: torch.Tensor, bounds: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow each request's draws as long as they were guessed; return tokens and counts.  # [requests, width]

    Row i of a request holds the draw after its i-th token, and the i-th token itself: the first is committed.
    """
    rows = bounds[:-1, None] + torch.arange(width, device=bounds.device)
    last = len(drawn) - 1
    held = (rows + 1 < bounds[1:, None]) & (drawn[rows.clamp(max=last)] == guessed[(rows + 1).clamp(max=last)])
    counts = 1 + held.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    return drawn[rows.clamp(max=last)], counts.clamp(max=width)
