"""A coordinator makes the verifier's tokenizer of the files that it gets."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaTokenizer

from outrider.models.tokenizer import load_tokenizer, read_tokenizer, save_tokenizer
from outrider.protocol.vocabulary import Vocabulary
from outrider.testing.toy_models import byte_tokenizer

VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]

# In a process without transformers yet, a second thread asks for it while the first one is in the middle of its import.
IN_THE_MIDDLE = """
import sys, threading, time

class Middle:
    def find_spec(self, name, path, target=None):
        if name.startswith("transformers.") and not second.ident:
            second.start()
            while second.is_alive() and not waits(sys._current_frames().get(second.ident)):
                time.sleep(0.001)

def waits(frame):
    return frame is not None and "importlib._bootstrap" in frame.f_code.co_filename

second, got = threading.Thread(target=lambda: got.append(work())), []
sys.meta_path.insert(0, Middle())
work()
second.join()
assert got, "the second thread failed"
"""


def test_two_threads_can_ask_for_a_tokenizer_first(tmp_path: Path) -> None:
    """Two targets of a fleet that starts: one was told that its tokenizer cannot be read, and registered later."""
    byte_tokenizer().save_pretrained(tmp_path)
    _ask_twice(
        f"from outrider.models.tokenizer import load_tokenizer\nwork = lambda: load_tokenizer(Path({str(tmp_path)!r}))"
    )


def test_two_threads_can_ask_for_the_grammars_of_two_targets_first(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    digest = Vocabulary.of(byte_tokenizer()).digest
    _ask_twice(
        "from drafter.grammar import TargetGrammars\nfrom outrider.settings.drafter import DrafterSettings\n"
        f"grammars = TargetGrammars(DrafterSettings(kind='suffix', target={str(tmp_path)!r}))\n"
        f"work = lambda: grammars._load({digest!r}, (256,))"
    )


@pytest.mark.parametrize("own", ["", "{{ messages }}"], ids=["none", "own"])
def test_a_chat_template_in_a_file_apart_is_read_where_there_is_no_other(own: str, tmp_path: Path) -> None:
    """LLaVA and SmolVLM have it in one that their processors read: chats were refused."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = own or None
    tokenizer.save_pretrained(tmp_path)
    assert read_tokenizer(tmp_path).chat_template == (own or None)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "é{{ messages[0].content }}"}))
    assert read_tokenizer(tmp_path).chat_template == (own or "é{{ messages[0].content }}")
    assert read_tokenizer(tmp_path).encode("a") == tokenizer.encode("a")


def _ask_twice(work: str) -> None:
    code = f"from pathlib import Path\n{work}\n{IN_THE_MIDDLE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


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
