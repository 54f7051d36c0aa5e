"""Medusa: several tokens at once from the last hidden state of the target's, which comes with each commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from drafter.artifacts import read_trained
from drafter.draft_sampling import next_token, offers, spread
from drafter.interface import DraftRequest, DraftResult
from drafter.methods.registry import drafter
from drafter.settings import DrafterSettings
from drafter.tree_builder import TreeBuilder
from outrider.engine.loading.loader import pick_device
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import Distribution
from outrider.protocol.vocabulary import Vocabulary
from outrider.train.artifacts.medusa import METHOD, Medusa


class MedusaDrafter:
    wants_features = True

    def __init__(self, medusa: Medusa, info: ModelInfo, candidates: int) -> None:
        self.info = info
        self.vocabulary: Vocabulary | None = None  # it was made for one target: see ModelInfo.made_for
        self._medusa = medusa
        self._candidates = candidates
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # the target's last state, and its position

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        return [self._draft(ask) for ask in asks]

    def forget(self, session: str) -> None:
        self._states.pop(session, None)

    def _draft(self, ask: DraftRequest) -> DraftResult:
        for features in ask.features:
            row = np.frombuffer(features.rows, dtype="<f2")[-features.width :].astype(np.float32)
            position = features.position + len(features.rows) // (2 * features.width) - 1
            self._states[ask.session] = position, torch.from_numpy(row).to(self._medusa.embeddings.device)
        if ask.session not in self._states:
            return DraftResult(done=True)
        position, state = self._states[ask.session]
        token = torch.tensor(ask.tokens[position + 1], device=state.device)
        # Head 0 foretells the token at position + 2; of later ones some may be committed by now.
        first = ask.committed - position - 2
        foretold = [self._medusa.foretell(state, token, head) for head in range(first, len(self._medusa.heads))]
        if not foretold:
            return DraftResult(done=True)
        logits = spread(self._medusa.logits(torch.stack(foretold)), self._medusa.ids, ask.vocab_size)
        return self._grow(ask, logits) if ask.branches > 1 else self._chain(ask, logits)

    def _chain(self, ask: DraftRequest, logits: torch.Tensor) -> DraftResult:
        tokens = list(ask.tokens)
        probs: list[Distribution] = []
        for row in logits[len(tokens) - ask.committed :][: ask.room]:
            found = next_token(ask, row[None], tokens, self._candidates)
            if found is None:
                break
            token, drawn_from = found
            tokens.append(token)
            if drawn_from is not None:
                probs.append(drawn_from)
        drafted = tuple(tokens[len(ask.tokens) :])
        return DraftResult(drafted, tuple(probs), done=len(drafted) < ask.room)

    def _grow(self, ask: DraftRequest, logits: torch.Tensor) -> DraftResult:
        """What may follow a place depends on its depth alone."""
        growth = TreeBuilder(ask)
        new: list[int] = growth.open_places()
        while new:
            new = [place for place in new if growth.depth(place) < len(logits)]
            paths = [growth.path(place) for place in new]
            found = offers(ask, logits[[len(path) for path in paths]], paths) if new else []
            for place, choices in zip(new, found, strict=True):
                growth.offer(place, choices)
            added = growth.add()
            new = [] if added is None else [added]
        return growth.draft(done=growth.room > 0)


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> MedusaDrafter:
    trained = read_trained(settings, METHOD, progress)
    medusa = Medusa.from_weights(trained.card.shape, trained.weights, trained.ends).eval()
    medusa.to(pick_device(settings.device))
    return MedusaDrafter(medusa, trained.info, settings.draft_candidates)
