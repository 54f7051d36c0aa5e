"""Medusa: several tokens at once from the target's last hidden state, which arrives with each commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafter.artifacts import read_trained
from drafter.draft_sampling import draft_places
from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from outrider.hidden_states.rows import decode
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts.medusa import METHOD, Medusa


class MedusaDrafter:
    """Drafter whose heads predict one position each."""

    needs_hidden_states = True

    def __init__(self, medusa: Medusa, info: ModelInfo, candidates: int) -> None:
        self.info = info
        self.vocabulary: Vocabulary | None = None  # bound to one target instead: ModelInfo.target_digest
        self.vocab_limit = len(medusa.embeddings)
        self._medusa = medusa
        self._candidates = candidates
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # by session: position and last hidden state

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        self._states.pop(session, None)

    def _draft(self, request: DraftRequest) -> Guess:
        if request.hidden_states:
            newest = request.hidden_states[-1]
            state = decode(newest)[-1].to(self._medusa.embeddings.device)
            self._states[request.session] = newest.position + newest.count - 1, state
        if request.session not in self._states:
            return request.chain(done=True)
        position, state = self._states[request.session]
        token = torch.tensor(request.tokens[position + 1], device=state.device)
        # Head 0 predicts the token at position + 2. Skip the heads whose tokens are committed by now.
        first = request.committed - position - 2
        states = [self._medusa.predict(state, token, head) for head in range(first, len(self._medusa.heads))]
        if not states:
            return request.chain(done=True)
        logits, ids = self._medusa.logits(torch.stack(states)), self._medusa.ids
        return draft_places(request, lambda paths: logits[list(map(len, paths))], len(logits), self._candidates, ids)


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> MedusaDrafter:
    medusa, info = read_trained(settings, METHOD, Medusa.from_weights, progress)
    return MedusaDrafter(medusa, info, settings.draft_candidates)
