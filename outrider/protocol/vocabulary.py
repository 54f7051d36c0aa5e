"""Vocabularies of models, compared so that mismatched models are never paired."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from outrider.protocol.checks import MAX_IDS
from outrider.protocol.errors import InvalidRequest, ModelMismatch


class _Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Vocabulary:
    """Token text by id; ids without a token are empty."""

    tokens: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: _Tokenizer) -> Vocabulary:
        vocab = tokenizer.get_vocab()
        if (size := max(vocab.values(), default=-1) + 1) > MAX_IDS:
            raise InvalidRequest.of("vocabulary", f"one with the id {size - 1}", f"one of ids below {MAX_IDS}")
        tokens = [""] * size
        for token, token_id in vocab.items():
            tokens[token_id] = token
        return cls(tuple(tokens))

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for token in self.tokens:
            data = token.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()[:32]


def check_same_vocabulary(target: Vocabulary, first_id: int, drafter_tokens: Iterable[str], *, last: bool) -> None:
    """Raise ModelMismatch for the first id at which a drafter's token differs from the target's."""
    token_id = first_id - 1
    for token_id, token in enumerate(drafter_tokens, start=first_id):
        wanted = target.tokens[token_id] if token_id < len(target.tokens) else None
        if token != wanted:
            raise _mismatch(token_id, token, wanted)
    if last and token_id + 1 < len(target.tokens):
        raise _mismatch(token_id + 1, None, target.tokens[token_id + 1])


def _mismatch(token_id: int, drafter: str | None, target: str | None) -> ModelMismatch:
    def shown(token: str | None) -> str:
        return "no such id" if token is None else repr(token)

    return ModelMismatch(
        f"the drafter's vocabulary differs from the target's, first at token id {token_id}: "
        f"the drafter has {shown(drafter)}, the target {shown(target)}",
        field=f"vocabulary[{token_id}]",
        value=shown(drafter),
        limit=shown(target),
    )
