"""Medusa: several tokens at once from the target's last hidden state, which arrives with each commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafter.artifacts import read_trained
from drafter.draft_sampling import Ids, add_choices, next_token
from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from drafter.tree_builder import TreeBuilder
from outrider.hidden_states.rows import decode
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
        for part in request.hidden_states:
            last = decode(part)[-1].to(self._medusa.embeddings.device)
            self._states[request.session] = part.position + part.count - 1, last
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


# Logits of the places behind these paths of guesses (empty: the first after the committed tokens); no row: it ends.
Rows = Callable[[Sequence[Sequence[int]]], torch.Tensor]


def draft_places(
    request: DraftRequest, rows: Rows, num_places: int, candidates: int, ids: Ids, *, by_level: bool = False
) -> Guess:
    """Draft through places that are predicted together. `by_level`: about a level of a tree at once."""
    if request.branches > 1:
        return _draft_tree(request, rows, num_places, ids, by_level)
    tokens = list(request.tokens)
    probs: list[Distribution] = []
    first = len(tokens) - request.committed
    for _ in range(first, min(num_places, first + request.max_new_tokens)):
        logits = rows([tokens[request.committed :]])
        choice = next_token(request, logits, tokens, candidates, ids) if len(logits) else None
        if choice is None:
            break
        tokens.append(choice[0])
        probs += choice[1]
    drafted = tokens[len(request.tokens) :]
    return request.chain(drafted, probs, done=len(drafted) < request.max_new_tokens)


def _draft_tree(request: DraftRequest, rows: Rows, num_places: int, ids: Ids, by_level: bool) -> Guess:
    builder = TreeBuilder(request)
    new: list[int] = builder.expandable_nodes()
    while new:
        new = [node for node in new if builder.depth(node) < num_places]
        if new:
            add_choices(request, builder, new, rows([builder.path(node) for node in new]), ids)
        added = [builder.add() for _ in range(builder.level_budget if by_level else 1)]
        new = [node for node in added if node is not None]
    return builder.guess(done=builder.remaining > 0)


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> MedusaDrafter:
    medusa, info = read_trained(settings, METHOD, Medusa.from_weights, progress)
    return MedusaDrafter(medusa, info, settings.draft_candidates)
