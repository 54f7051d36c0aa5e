"""A stand-in engine for `outrider bench overhead`: answers at once and holds no model.

The token after x is always (x + 1) mod 256, so that the matching drafter is
always right and all the time that passes is the services' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from outrider.engine.interface import SessionTokens, StepResult
from outrider.models.tokenizer import save_tokenizer
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.vocabulary import Vocabulary

_VOCAB = 256


def next_token(token: int) -> int:
    return (token + 1) % _VOCAB


class MockEngine:
    def __init__(self) -> None:
        self.vocabulary = Vocabulary(tuple(f"t{i}" for i in range(_VOCAB)))
        self.device = torch.device("cpu")
        self.info = ModelInfo(
            name="instant",
            fingerprint="instant",
            architecture="none",
            vocab_size=_VOCAB,
            vocabulary_digest=self.vocabulary.digest,
            context_length=1 << 20,
        )
        self._answers = torch.eye(_VOCAB).roll(1, dims=1)
        self._lengths: dict[str, int] = {}

    @property
    def capacity_tokens(self) -> int:
        return 1 << 30

    @property
    def cached_tokens(self) -> int:
        return sum(self._lengths.values())

    @property
    def evictable_tokens(self) -> int:
        return 0

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return 0

    def length(self, session: str) -> int:
        return self._lengths.get(session, 0)

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        logits: list[torch.Tensor] = []
        for rows in batch:
            self._lengths[rows.session] = self.length(rows.session) + len(rows.tokens)
            logits.append(self._answers[list(rows.tokens[rows.logits_from :])])
        hidden_states = [
            torch.zeros(0 if rows.hidden_from is None else len(rows.tokens) - rows.hidden_from, 1) for rows in batch
        ]
        return StepResult(torch.cat(logits), logits, hidden_states)

    def truncate(self, session: str, length: int) -> None:
        self._lengths[session] = min(self.length(session), length)

    def compact(self, session: str, base: int, rows: Sequence[int]) -> None:
        self._lengths[session] = base + len(rows)

    def fork(self, session: str, copy: str) -> None:
        self._lengths[copy] = self._lengths[session]

    def free(self, session: str) -> None:
        self._lengths.pop(session, None)

    def save_tokenizer(self, into: Path) -> dict[str, Path]:
        model = WordLevel({token: i for i, token in enumerate(self.vocabulary.tokens)}, unk_token="t0")  # noqa: S106
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return save_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), into)
