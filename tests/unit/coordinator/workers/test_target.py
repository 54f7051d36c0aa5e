"""The bytes of a token, by what the vocabulary's decoder says and not by its letters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from coordinator.workers import target as target_module
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target, fetch_target
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.vocabulary import Vocabulary
from outrider.speculation.grammar import GrammarCompiler
from outrider.testing.toy_models import EOS, byte_tokenizer
from outrider.v1 import verifier_pb2 as pb


def target_of(tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(
        ModelInfo("m", "f", context_length=2048), tokenizer, Vocabulary.of(tokenizer), cast(GrammarCompiler, None)
    )


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma write it, with a letter that byte-level vocabularies write a space with."""
    words = ["<unk>", "▁the", "Ġ", "▁aĠa", "é", "Ã©", "<0x0A>", "<0xC3>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_tokens(["<tool▁>"])
    return fast


@pytest.mark.parametrize(
    ("token", "bytes_"),
    [
        ("▁the", b" the"),
        ("Ġ", "Ġ".encode()),
        ("▁aĠa", " aĠa".encode()),
        ("é", "é".encode()),
        ("Ã©", "Ã©".encode()),
        ("<0x0A>", b"\n"),
        ("<0xC3>", b"\xc3"),
        ("<tool▁>", "<tool▁>".encode()),
    ],
)
def test_of_sentencepiece(token: str, bytes_: bytes) -> None:
    tokenizer = sentencepiece()
    assert target_of(tokenizer).token_bytes(tokenizer.convert_tokens_to_ids(token)) == bytes_


@pytest.mark.parametrize(
    ("token", "bytes_"), [("Ġ", b" "), ("Ã", b"\xc3"), ("a", b"a"), ("<tool é>", "<tool é>".encode())]
)
def test_of_byte_level(token: str, bytes_: bytes) -> None:
    tokenizer = byte_tokenizer(("<tool é>",))
    assert target_of(tokenizer).token_bytes(tokenizer.convert_tokens_to_ids(token)) == bytes_


def test_a_chat_without_a_free_mark_for_its_control_token_is_refused() -> None:
    """The cuts are marked with a private-use character that the chat does not have."""
    private = "".join(map(chr, range(0xE000, 0xF900)))
    target = target_of(byte_tokenizer())

    def encoded(*texts: str) -> tuple[int, ...]:
        return target.encode_chat(Chat([{"role": "user", "content": text} for text in texts]))

    assert encoded(private)
    assert encoded(private[1:] + EOS)
    with pytest.raises(InvalidRequest) as refused:
        encoded(private, EOS)
    assert refused.value.field == "chat.messages"


def test_a_template_that_repeats_a_chat_in_its_error_is_told_of_in_short() -> None:
    """Clients log such errors, and the texts of a chat with them."""
    target = target_of(byte_tokenizer())
    target.tokenizer.chat_template = "{{ raise_exception('Odd: ' + messages[0]['content']) }}"
    with pytest.raises(InvalidRequest, match="rejects these messages: Odd: secret") as refused:
        target.encode_chat(Chat([{"role": "user", "content": "secret " * 1000}]))
    assert len(refused.value.message) < 250


def test_of_an_id_that_is_none() -> None:
    assert target_of(byte_tokenizer()).token_bytes(100_000) == b""


async def test_a_tokenizer_on_which_the_library_panics_is_refused() -> None:
    """A panic in Rust is no Exception; the loop that reads other coordinators' workers would end, and the process."""
    damaged = json.loads(sentencepiece().backend_tokenizer.to_str())
    damaged["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}

    class Verifier:
        async def GetTokenizer(self, *_: object, **__: object) -> AsyncIterator[pb.FileChunk]:
            yield pb.FileChunk(name="tokenizer.json", data=json.dumps(damaged).encode())

    with pytest.raises(InvalidRequest, match="cannot be read"):
        await fetch_target(ModelInfo("m", "f"), "f", cast(Any, Verifier()))


async def test_a_tokenizer_without_end_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty chunks count as well."""
    monkeypatch.setattr(target_module, "MAX_TOKENIZER_BYTES", 10_000)
    sent = 0

    class Endless:
        async def GetTokenizer(self, request: object, timeout: float) -> AsyncIterator[pb.FileChunk]:
            nonlocal sent
            while sent < 1000:
                sent += 1
                yield pb.FileChunk(name="tokenizer.json")

    with pytest.raises(InvalidRequest, match="tokenizer files"):
        await fetch_target(ModelInfo("m", "f"), "f", cast(Any, Endless()))
    assert sent < 12
