"""A coordinator makes the verifier's tokenizer of the files that it gets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import LlamaTokenizer

from outrider.models.tokenizer import load_tokenizer, save_tokenizer
from outrider.testing.toy_models import byte_tokenizer

VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]


@pytest.mark.parametrize("legacy", [True, False])
def test_a_text_has_the_same_tokens_on_both_sides(legacy: bool, tmp_path: Path) -> None:
    """With `legacy`, which is not saved, a space is put behind special tokens too: each turn of a chat lacked one."""
    vocab = {token: number for number, token in enumerate(VOCABULARY)}
    made = LlamaTokenizer(vocab=vocab, merges=[("▁", "a"), ("a", "b")], legacy=legacy)
    assert set(save_tokenizer(made, tmp_path)) >= {"tokenizer.json", "tokenizer_config.json"}
    loaded = load_tokenizer(tmp_path)
    for text in ("ab", "ab</s>ab", "  a", "é"):
        assert loaded.encode(text) == made.encode(text), text
        assert loaded.decode(made.encode(text)) == made.decode(made.encode(text))
    assert loaded.all_special_ids == made.all_special_ids


@pytest.mark.parametrize("template", ["{{ tools }}", {"default": "{{ messages }}", "tool_use": "{{ tools }}"}])
def test_all_chat_templates_are_sent(template: str | dict[str, str], tmp_path: Path) -> None:
    """Hermes and Command R have one for tools beside the default, saved in a folder of its own; it was not sent."""
    made = byte_tokenizer()
    made.chat_template = template
    (tmp_path / "sent").mkdir()
    for name, path in save_tokenizer(made, tmp_path / "saved").items():
        shutil.copy(path, tmp_path / "sent" / name)
    assert load_tokenizer(tmp_path / "sent").chat_template == template
