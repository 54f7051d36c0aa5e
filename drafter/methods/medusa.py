"""Medusa: several tokens at once from the target's last hidden state, which arrives with each commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from drafter.artifacts import read_trained
from drafter.draft_sampling import next_token, token_choices
from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from drafter.tree_builder import TreeBuilder
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Distribution, Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts.medusa import METHOD, Medusa


class MedusaDrafter:
    """Drafter whose heads predict one position each."""

    needs_hidden_states = True

    def __init__(self, medusa: Medusa, info: ModelInfo, candidates: int) -> None:
        self.info = info
        self.vocabulary: Vocabulary | None = None  # bound to one target instead: ModelInfo.target_digest
        self._medusa = medusa
        self._candidates = candidates
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # by session: position and last hidden state

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        self._states.pop(session, None)

    def _draft(self, request: DraftRequest) -> Guess:
        for part in request.hidden_states:
            last = np.frombuffer(part.rows, dtype="<f2")[-part.width :].astype(np.float32)
            position = part.position + part.count - 1
            self._states[request.session] = position, torch.from_numpy(last).to(self._medusa.embeddings.device)
        if request.session not in self._states:
            return request.chain(done=True)
        position, state = self._states[request.session]
        token = torch.tensor(request.tokens[position + 1], device=state.device)
        # Head 0 predicts the token at position + 2. Skip the heads whose tokens are committed by now.
        first = request.committed - position - 2
        states = [self._medusa.predict(state, token, head) for head in range(first, len(self._medusa.heads))]
        if not states:
            return request.chain(done=True)
        logits = self._medusa.logits(torch.stack(states))
        return self._draft_tree(request, logits) if request.branches > 1 else self._draft_chain(request, logits)

    def _draft_chain(self, request: DraftRequest, logits: torch.Tensor) -> Guess:
        tokens = list(request.tokens)
        probs: list[Distribution] = []
        for row in logits[len(tokens) - request.committed :][: request.max_new_tokens]:
            found = next_token(request, row[None], tokens, self._candidates, self._medusa.ids)
            if found is None:
                break
            token, distribution = found
            tokens.append(token)
            if distribution is not None:
                probs.append(distribution)
        drafted = tokens[len(request.tokens) :]
        return request.chain(drafted, probs, done=len(drafted) < request.max_new_tokens)

    def _draft_tree(self, request: DraftRequest, logits: torch.Tensor) -> Guess:
        """Draft a tree whose choices depend on a node's depth alone."""
        builder = TreeBuilder(request)
        new: list[int] = builder.expandable_nodes()
        while new:
            new = [node for node in new if builder.depth(node) < len(logits)]
            paths = [builder.path(node) for node in new]
            found = (
                token_choices(request, logits[[len(path) for path in paths]], paths, self._medusa.ids) if new else []
            )
            for node, choices in zip(new, found, strict=True):
                builder.add_choices(node, choices)
            added = builder.add()
            new = [] if added is None else [added]
        return builder.guess(done=builder.remaining > 0)


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> MedusaDrafter:
    trained = read_trained(settings, METHOD, progress)
    medusa = Medusa.from_weights(trained.card.shape, trained.weights, trained.embeddings_and_head).eval()
    medusa.to(EngineOptions.of(settings).selected_device)
    return MedusaDrafter(medusa, trained.info, settings.draft_candidates)
