"""Whole sessions with published drafters on a target that is a table, and whether their texts follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from drafter.interface import Drafter, DraftRequest
from drafter.methods.eagle import EagleDrafter
from drafter.methods.published_blocks import BlockDrafter
from drafter.published.dflash import PublishedDflash
from drafter.published.eagle3 import PublishedPeagle
from drafter.published.loading import PublishedCheckpoint
from drafter.published.row_engine import RowEngine
from outrider.hidden_states.rows import encode
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import DraftSteering, Guess
from outrider.speculation.acceptance import SeededNoise
from outrider.speculation.tree import GuessTree
from outrider.speculation.verification import SessionSampling
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from tests import published
from tests.unit.drafter.test_exactness_of_drafters import Setting, play
from tests.unit.outrider.speculation.rules import verify
from tests.unit.outrider.speculation.test_exactness import Path as Text
from tests.unit.outrider.speculation.test_exactness import chi_square

IDS = 3
LENGTH = 3
PROMPT = (0, 1, 2, 1)
# By the last token.
TARGET = torch.tensor([[0.3, 0.4, 0.3], [0.4, 0.3, 0.3], [0.3, 0.25, 0.45]], dtype=torch.float64).log()
KINDS: dict[str, published.Maker] = {
    "eagle": published.eagle,
    "eagle3": partial(published.eagle3, draft_vocab=None),
    "deepseek-mtp": published.deepseek,
    "qwen-mtp": published.qwen,
    "peagle": partial(published.eagle3, layout="speculators", kind="peagle", draft_vocab=None, mask_token_id=2),
    "dflash": partial(published.dflash, dflash_config={"mask_token_id": 2, "target_layer_ids": [1, 3]}),
    "dspark": partial(published.dflash, kind="dspark", mask_token_id=2),
    "dspark-gated": partial(published.dflash, kind="dspark", mask_token_id=2, markov="gated"),
    "dspark-rnn": partial(published.dflash, kind="dspark", mask_token_id=2, markov="rnn"),
}


@dataclass
class Fed:
    """A drafter that gets a state for each committed token but the last; any would do."""

    drafter: EagleDrafter | BlockDrafter
    needs_hidden_states: bool = True
    vocabulary: None = None
    info: ModelInfo = field(default_factory=lambda: ModelInfo("fed", "fed", vocab_size=IDS))
    sent: int = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        self.sent = 0
        self.drafter.forget(session)

    def _draft(self, request: DraftRequest) -> Guess:
        new = list(request.tokens[self.sent : request.committed - 1])
        if new:
            states = _STATES[new]
            piece = HiddenStates(self.sent, states.shape[1], encode(states).numpy().tobytes(), 1)
            self.sent += len(new)
            object.__setattr__(request, "hidden_states", (piece,))
        return self.drafter.draft([request])[0]


_STATES = torch.randn(IDS, published.HIDDEN, generator=torch.Generator().manual_seed(4))


def drafter_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Return a drafter of few ids, which guesses neither well nor badly."""
    monkeypatch.setattr(published, "VOCAB", IDS)
    monkeypatch.setitem(published.LLAMA, "vocab_size", IDS)
    matrix = torch.randn(IDS, published.HIDDEN, generator=torch.Generator().manual_seed(9)) / published.HIDDEN**0.5
    module = PublishedCheckpoint.open(KINDS[name](folder)).load(EmbeddingsAndHead(matrix, matrix, None, 0.0))
    info = ModelInfo(name, name, vocab_size=IDS)
    if isinstance(module, (PublishedPeagle, PublishedDflash)):
        return Fed(BlockDrafter(module, 4096, info, IDS))
    engine = RowEngine(module, 4096)
    return Fed(EagleDrafter(engine, engine, info, IDS))


@dataclass
class Sessions:
    """Sessions with one drafter or none, a seed each."""

    drafter: Drafter | None
    mode: Verification
    branches: int = 1
    accepted: int = 0

    def texts(self, draws: int) -> list[Text]:
        return [self._text(seed) for seed in range(draws)]

    def _text(self, seed: int) -> Text:
        params = SamplingParams(seed=seed, max_tokens=LENGTH, verification=self.mode)
        chance = SeededNoise(seed)

        def step(committed: Sequence[int], block: Guess, tree: GuessTree) -> Sequence[int]:
            logits = TARGET[[committed[-1], *block.tokens]]
            verified = verify(logits, block, SessionSampling(params, None, chance))
            self.accepted += len(verified.outcome.path)
            return verified.tokens

        steering = DraftSteering(gamma=3, branches=self.branches)
        return play(Setting(params, IDS, PROMPT, steering), [self.drafter] if self.drafter else [], step)


def p_value(texts: Sequence[Text]) -> float:
    """Return the least probability of a statistic so far from the target's, over pairs of neighbouring tokens."""
    rows, found = TARGET.softmax(dim=-1), []
    state = rows[PROMPT[-1]]
    for at in range(LENGTH - 1):
        joint = state[:, None] * rows
        probs = {(one, other): float(joint[one, other]) for one in range(IDS) for other in range(IDS)}
        found.append(chi_square(Counter(text[at : at + 2] for text in texts), probs, len(texts)))
        state = state @ rows
    return min(found)
