"""Outrider's draws and acceptance in vLLM's workers.

Every rank of a split model computes the same: all noise is a function of seed
and position, so the ranks need not agree on a generator.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from outrider.engine.vllm.messages import EXTRA, PADDING, Computed, Opening, Plan, StepMasks, extra
from outrider.protocol.speculation import Guess
from outrider.speculation.acceptance import SeededNoise
from outrider.speculation.sampling import History
from outrider.speculation.verification import SessionSampling, VerifyResult, verify_batch


@dataclass(frozen=True, slots=True)
class _SampledRequest:
    """Sampling state of one request."""

    opening: Opening
    history: History | None
    noise: SeededNoise


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, as a model runner lays them out."""

    requests: Sequence[str]
    rows: Sequence[int]  # of logits, by request
    whole: Sequence[bool]  # whether all tokens of a request are computed, so that its next one is drawn
    starts: Sequence[int]  # first row of hidden states, by request


class Judge:
    """The sampling state of a worker's requests, and the verification of each step."""

    def __init__(self, vocab_size: int, device: torch.device, *, alone: bool = True) -> None:
        """Begin without requests. A worker that is not alone sends its results to another process."""
        self._vocab_size = vocab_size
        self._device = device
        self._alone = alone
        self._sessions: dict[str, _SampledRequest] = {}
        self._plan: Plan = {}
        self._scheduled: Any = None
        self.masks: StepMasks | None = None  # the tokens that grammars allow in the step
        self._ends: dict[str, int] = {}  # position after the committed tokens of the step
        self.computed: dict[str, Computed] = {}

    def begin(self, scheduled: Any) -> None:
        """Take vLLM's SchedulerOutput: who comes, who goes, and what is guessed."""
        for name in scheduled.finished_req_ids:
            self._sessions.pop(name, None)
        self._scheduled = scheduled
        self._plan = extra(scheduled)
        self.masks = None
        self._ends = {}
        self.computed = {}
        for new in scheduled.scheduled_new_reqs:
            self._sessions[new.req_id] = self._session(new)
            self._place(new.req_id, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for name, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._place(name, num_computed)

    def verify(self, logits: torch.Tensor, hidden: Sequence[torch.Tensor], batch: StepRows) -> list[tuple[int, ...]]:
        """Return each request's tokens: the accepted guesses and the target's own; none for a prompt chunk."""
        verified, errors = self._verify_all(logits, batch)
        committed: list[tuple[int, ...]] = []
        for name, start in zip(batch.requests, batch.starts, strict=True):
            result = verified.get(name)
            states = self._hidden_states(name, hidden, start, result)
            self.computed[name] = Computed(result, states, errors.get(name, ""))
            committed.append(() if result is None else result.tokens)
        return committed

    def finish(self, output: Any) -> Any:
        """Attach what was computed to vLLM's ModelRunnerOutput."""
        setattr(getattr(output, "model_runner_output", output), EXTRA, self.computed)
        return output

    def _session(self, new: Any) -> _SampledRequest:
        opening: Opening = new.sampling_params.extra_args[EXTRA]
        history = None
        if opening.params.penalised:
            # The newer runner names a resumed request's output tokens too.
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            history = History(list(tokens), opening.prompt_length, self._vocab_size, self._device)
        return _SampledRequest(opening, history, SeededNoise(opening.params.seed or 0))

    def _place(self, name: str, num_computed: int) -> None:
        guessed = len(self._scheduled.scheduled_spec_decode_tokens.get(name, ()))
        self._ends[name] = num_computed + self._scheduled.num_scheduled_tokens[name] - guessed

    def _verify_all(self, logits: torch.Tensor, batch: StepRows) -> tuple[dict[str, VerifyResult], dict[str, str]]:
        """Return results and errors by request; a prompt chunk has neither."""
        firsts = accumulate(batch.rows, initial=0)
        whole = {name: first for name, first, ends in zip(batch.requests, firsts, batch.whole, strict=False) if ends}
        verified, errors = self._verify_each(logits, whole)
        for name, result in verified.items():
            if (history := self._sessions[name].history) is not None:
                history.append(result.tokens)
        return verified, errors

    def _verify_each(
        self, logits: torch.Tensor, firsts: Mapping[str, int]
    ) -> tuple[dict[str, VerifyResult], dict[str, str]]:
        """Verify all requests together; where that fails one by one, so that the others get their results."""
        try:
            blocks = [self._block(name, self._ends[name]) for name in firsts]
            sessions = [self._sampling(name) for name in firsts]
            return dict(zip(firsts, verify_batch(logits, blocks, sessions, list(firsts.values())), strict=True)), {}
        except Exception as failure:
            if len(firsts) == 1:
                return {}, dict.fromkeys(firsts, f"{type(failure).__name__}: {failure}")
        each = [self._verify_each(logits, {name: first}) for name, first in firsts.items()]
        return dict(ChainMap(*(verified for verified, _ in each))), dict(ChainMap(*(errors for _, errors in each)))

    def _sampling(self, name: str) -> SessionSampling:
        session = self._sessions[name]
        allowed = None if self.masks is None else self.masks.unpack(name)
        return SessionSampling(session.opening.params, session.history, session.noise, allowed)

    def _block(self, name: str, position: int) -> Guess:
        tokens = tuple(id_ for id_ in self._scheduled.scheduled_spec_decode_tokens.get(name, ()) if id_ != PADDING)
        planned = self._plan.get(name)
        draft_probs = () if planned is None else planned.draft_probs[: len(tokens)]
        return Guess(position, 0, 0, tokens, draft_probs)

    def _hidden_states(
        self, name: str, states: Sequence[torch.Tensor], first: int, verified: VerifyResult | None
    ) -> torch.Tensor | None:
        """Return the states of committed tokens and accepted guesses from the wanted position on."""
        planned = self._plan.get(name)
        if not states or planned is None or planned.hidden_from is None:
            return None
        guessed = len(self._scheduled.scheduled_spec_decode_tokens.get(name, ()))
        num_committed = self._scheduled.num_scheduled_tokens[name] - guessed
        accepted = 0 if verified is None else len(verified.outcome.path)
        start = max(0, planned.hidden_from - (self._ends[name] - num_committed))
        rows = slice(first + start, first + num_committed + accepted)
        kept = torch.cat([each[rows] for each in states], dim=1)
        return kept if self._alone else kept.cpu()


def padded(committed: Sequence[Sequence[int]], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return tokens as vLLM's samplers do, PADDING after the last.  # [requests, width]

    vLLM discards what stands for a request without tokens.
    """
    rows = [[*(tokens or (0,)), *[PADDING] * (width - max(1, len(tokens)))] for tokens in committed]
    return torch.tensor(rows, dtype=dtype, device=device)
