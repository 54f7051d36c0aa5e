"""An engine without a model, for tests and `outrider bench overhead`.

The token after x is always (x + 1) mod 256. The mock drafter is always right: all measured time is the services'.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from outrider.engine.interface import SessionTokens, StepResult
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.vocabulary import Vocabulary

_VOCAB = 256


def next_token(token: int) -> int:
    """Return the token that follows another one."""
    return (token + 1) % _VOCAB


class MockEngine:
    """An engine that returns fixed logits at once."""

    capacity_tokens, evictable_tokens = 1 << 30, 0

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(tuple(f"t{i}" for i in range(_VOCAB)))
        self.device = torch.device("cpu")
        self.info = ModelInfo(
            name="mock",
            fingerprint="mock",
            architecture="none",
            vocab_size=_VOCAB,
            vocabulary_digest=self.vocabulary.digest,
            context_length=1 << 20,
        )
        self._answers = torch.eye(_VOCAB).roll(1, dims=1)
        self.state_shape = (0, 1)
        self._lengths: dict[str, int] = {}

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        return 0

    def length(self, session: str) -> int:
        return self._lengths.get(session, 0)

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        logits: list[torch.Tensor] = []
        for new in batch:
            self._lengths[new.session] = self._lengths.get(new.session, 0) + len(new.tokens)
            logits.append(self._answers[list(new.tokens[new.logits_from :])])
        counts = (0 if new.hidden_from is None else len(new.tokens) - new.hidden_from for new in batch)
        hidden_states = [torch.zeros(count, 1) for count in counts]
        return StepResult(torch.cat(logits), [len(each) for each in logits], hidden_states)

    def truncate(self, session: str, length: int) -> None:
        self._lengths[session] = min(self.length(session), length)

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        self._lengths[session] = base + len(indices)

    def free(self, session: str) -> None:
        self._lengths.pop(session, None)

    def save_tokenizer(self, into: Path) -> dict[str, Path]:
        """Save a tokenizer of its vocabulary, and return the files by name."""
        model = WordLevel({token: i for i, token in enumerate(self.vocabulary.tokens)}, unk_token="t0")  # noqa: S106
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = WhitespaceSplit()
        (into / "tokenizer.json").write_text(tokenizer.to_str())
        (into / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return {path.name: path for path in into.iterdir()}
