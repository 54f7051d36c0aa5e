"""A GGUF file's tokenizer cuts texts as the file says, and has its chat templates."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from outrider.models.hub import locate, locate_safetensors
from outrider.models.tokenizer import load_tokenizer, save_tokenizer
from outrider.protocol.errors import StartupError
from outrider.protocol.vocabulary import Vocabulary
from tests.gguf_files import write_gguf
from tests.unit.outrider.models.gguf_models import SMALL, scaled_file

pytestmark = pytest.mark.usefixtures("own_home")


TURNS = ("<｜User｜>", "<｜Assistant｜>")


def tokenizers_of(path: Path, tmp_path: Path) -> list[Any]:
    """The verifier's tokenizer, and the coordinator's, which is made from files that the verifier sends."""
    own = AutoTokenizer.from_pretrained(locate(str(path), print))
    save_tokenizer(own, tmp_path / "sent")
    return [own, load_tokenizer(tmp_path / "sent")]


@pytest.mark.parametrize(
    ("architecture", "pre"), [("llama", "llama-bpe"), ("qwen2", "deepseek-r1-qwen"), ("qwen3", "qwen2")]
)
def test_added_tokens_are_found_whatever_their_letters(architecture: str, pre: str, tmp_path: Path) -> None:
    """Transformers takes DeepSeek's for spelled by bytes: turns of a chat were cut, BOS had an id past the model's."""
    shape = replace(SMALL, head_dim=128 if architecture == "qwen3" else 64)
    path = write_gguf(tmp_path / "turns.gguf", shape, lambda _: "Q8_0", architecture, pre=pre, added=TURNS)
    first = shape.vocab - 3
    for tokenizer in tokenizers_of(path, tmp_path):
        ids = tokenizer.encode("<｜User｜>a<｜Assistant｜>", add_special_tokens=False)
        assert ids == [first, tokenizer.convert_tokens_to_ids("a"), first + 1]
        assert tokenizer.decode(ids) == "<｜User｜>a<｜Assistant｜>"
        assert len(tokenizer) == shape.vocab
        assert max(tokenizer.encode("<|endoftext|></s>")) < shape.vocab, "of transformers' classes, not of the file"


def test_an_added_token_of_spaces_does_not_replace_the_one_that_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in GPT-NeoX's vocabulary, which StableLM 3B has. Spelled by bytes, both are ĠĠ, and one had no place."""
    add_types, add_merges = gguf.GGUFWriter.add_token_types, gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda it, types: add_types(it, [*types[:-3], 1, 4, 3]))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda it, merges: add_merges(it, [*merges, "Ġ Ġ"]))
    shape = replace(SMALL, vocab=288)
    path = write_gguf(tmp_path / "spaces.gguf", shape, lambda _: "Q8_0", pre="gpt-2", added=("ĠĠ", "  "))
    for tokenizer in tokenizers_of(path, tmp_path):
        assert tokenizer.convert_ids_to_tokens([shape.vocab - 3, shape.vocab - 2]) == ["ĠĠ", "  "]
        ids = tokenizer.encode("a  b", add_special_tokens=False)
        assert ids[1:-1] == [shape.vocab - 2]
        assert tokenizer.decode(ids) == "a  b"


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "ĊĊ", "1", "2", ".", "Ġb"]),
        ("gpt-2", ["a", "Ċ", "Ċ", "12", ".", "Ġb"]),
        ("mpt", ["a", "Ċ", "Ċ", "12", ".", "Ġb"]),
        ("deepseek-coder", ["a", "Ċ", "Ċ", "1", "2", ".", "Ġb"]),
        ("seed-coder", ["a", "ĊĊ", "1", "2", ".", "Ġb"]),
        ("lfm2", ["a", "ĊĊ", "12", ".", "Ġb"]),
    ],
)
def test_digits_are_apart_where_the_merges_were_learned_so(
    architecture: str, pre: str, pieces: list[str], tmp_path: Path
) -> None:
    for tokenizer in tokenizers_of(scaled_file(tmp_path, architecture, pre=pre), tmp_path):
        found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12. b")
        assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(("architecture", "rule"), [("llama", "gpt-2"), ("qwen2", "qwen2")])
def test_words_are_cut_by_the_usual_rule_where_a_file_names_none(
    architecture: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files of early 2024, of which some have no types of tokens either."""
    wanted = tokenizers_of(scaled_file(tmp_path, pre=rule), tmp_path)[0].backend_tokenizer.pre_tokenizer
    for left_out in ("add_tokenizer_pre", "add_token_types"):
        monkeypatch.setattr(gguf.GGUFWriter, left_out, lambda writer, _: None)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, architecture), tmp_path):
        found, text = tokenizer.backend_tokenizer.pre_tokenizer, "It's 123\n\n x"
        assert found.pre_tokenize_str(text) == wanted.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("deepseek-coder", "x=y  +  3.14", ["x", "=", "y", "  +  ", "3", ".", "1", "4"]),
        ("deepseek-coder", "if (ab):\r\n\tc", ["if", " (", "ab", "):", "\r", "\n", "\tc"]),
        ("deepseek-coder", "say 여기가 ab中文字", ["say", " ", "여기가", " ab", "中文字"]),
        ("seed-coder", "f(x);\n\n12 é's", ["f", "(x", ");", "\n\n", "1", "2", " é", "'s"]),
    ],
)
def test_the_rules_of_coders_cut_one_after_the_other(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    for tokenizer in tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path):
        found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in found] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "a.x-4.0", "qwen2"])
def test_words_are_cut_as_the_file_says_whatever_the_architecture(pre: str, tmp_path: Path) -> None:
    """Transformers cut those of all Qwens alike when it loaded them, of A.X 4.0 too."""
    wanted = tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path)[0].backend_tokenizer.pre_tokenizer
    path, text = tmp_path / "qwen.gguf", "It's 12345 o'CLOCK,\n\n  u\u0308ber/x"
    write_gguf(path, replace(SMALL, head_dim=128), lambda _: "Q8_0", "qwen3", pre=pre)
    for tokenizer in tokenizers_of(path, tmp_path):
        splits = tokenizer.backend_tokenizer.pre_tokenizer
        assert splits.pre_tokenize_str(text) == wanted.pre_tokenize_str(text)
        composed = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert ("\u0308" in composed) == (pre != "qwen2")
    if pre == "qwen2":
        assert Path(locate(str(scaled_file(tmp_path, "qwen2", pre=pre)), print)).is_dir()
    else:  # there transformers does so whatever the files say
        with pytest.raises(StartupError, match=rf"tokenizer\.ggml\.pre is {pre}, must be qwen2"):
            locate(str(scaled_file(tmp_path, "qwen2", pre=pre)), print)


def test_letters_are_composed_for_qwen3_5(tmp_path: Path) -> None:
    """As its own tokenizer does. Transformers reads the splits alone."""
    sizes = {"full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2}
    more: Any = {"ssm.time_step_rank": 2, "ssm.inner_size": 16, "rope.dimension_sections": [2, 1, 1, 0]}
    for tokenizer in tokenizers_of(scaled_file(tmp_path, "qwen35", pre="qwen35", fields=sizes | more), tmp_path):
        assert tokenizer.encode("u\u0308ber") == tokenizer.encode("über")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "stablelm2"])
def test_texts_split_alike_where_transformers_knows_no_kinds(
    pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 5.17 does not, which splits each of them like GPT-2. Of the last one, no release knows anything."""
    text = "It's 12345 o'CLOCK,\r\n\n  über\u00a0x ½ ..."
    (known, _), read = tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path), AutoTokenizer.from_pretrained

    def unaware(*given: Any, **more: Any) -> Any:
        found = read(*given, **more)
        if "gguf_file" in more:
            found.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return found

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unaware)
    (tmp_path / "old").mkdir()
    for tokenizer in tokenizers_of(scaled_file(tmp_path / "old", pre=pre), tmp_path / "old"):
        splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert splits == known.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert ("123" in dict(splits)) == (pre == "llama-bpe")
        assert ("1" in dict(splits)) == (pre != "llama-bpe")


@pytest.mark.parametrize(("pre", "whole", "begins"), [("llama-bpe", 1, 1), ("falcon-h1", 1, 1), ("qwen2", 2, 0)])
def test_a_word_that_is_a_token_needs_no_merge_in_llama3(
    pre: str, whole: int, begins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, words = gguf.GGUFWriter.add_token_merges, list[str]()

    def without_last(writer: gguf.GGUFWriter, merges: list[str]) -> None:
        words.append(merges[-1].replace(" ", ""))
        describe(writer, merges[:-1])

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", without_last)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path):
        assert len(tokenizer.encode(words[0], add_special_tokens=False)) == whole
        begun = tokenizer.encode("a")  # the file does not say whether a text begins with BOS
        assert begun[:-1] == [tokenizer.bos_token_id] * begins


@pytest.mark.parametrize(
    ("architecture", "stated", "ids"),
    [("llama", None, [4, 1]), ("llama", True, [4, 1]), ("llama", False, [2, 1]), ("gemma2", False, [2, 1])],
)
def test_a_space_is_put_first_unless_the_file_says_no(
    architecture: str, stated: bool | None, ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SentencePiece's tokenizers. Without that space none is taken from the beginning of an output either."""
    tokens = ["<unk>", "b", "a", "▁", "▁a", *(f"[PAD{number}]" for number in range(SMALL.vocab - 5))]

    def describe(writer: gguf.GGUFWriter, model: str) -> None:
        writer.add_string("tokenizer.ggml.model", "llama" if model == "gpt2" else model)
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        if stated is not None:
            writer.add_add_space_prefix(stated)

    add_tokens, add_types = gguf.GGUFWriter.add_token_list, gguf.GGUFWriter.add_token_types
    types = [2, 1, 1, 1, 1, *[5] * (SMALL.vocab - 5)]
    for kind in ("eos", "bos", "padding"):  # the first one of the padding is an end token all the same
        add = partial(gguf.GGUFWriter.add_uint32, key=f"tokenizer.ggml.{kind}_token_id", val=5)
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{kind[:3]}_token_id", lambda writer, _, add=add: add(writer))
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", describe)
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", lambda writer, _: add_tokens(writer, tokens))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda writer, _: add_types(writer, types))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda writer, _: None)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, architecture), tmp_path):
        assert tokenizer.encode("ab", add_special_tokens=False) == ids
        assert tokenizer.decode([4, 1]) == ("ab" if stated is not False else " ab")
        assert sorted(tokenizer.get_vocab().values()) == list(range(6)), "without padding, and <s> of transformers"
        assert tokenizer.eos_token_id == 5


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_of_the_head_without_a_token_are_no_part_of_the_vocabulary(architecture: str, tmp_path: Path) -> None:
    """The sizes of Qwen2.5 have different numbers of them, and its safetensors name none: one must draft for others."""
    found = []
    for padding in (0, 8):
        shape = replace(SMALL, vocab=SMALL.vocab + padding)
        path = write_gguf(tmp_path / f"{padding}.gguf", shape, lambda _: "Q8_0", architecture, padding=padding)
        assert AutoConfig.from_pretrained(locate(str(path), print)).vocab_size == shape.vocab
        found += [Vocabulary.of(tokenizer) for tokenizer in tokenizers_of(path, tmp_path)]
    assert len({vocabulary.digest for vocabulary in found}) == 1


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_tokens_are_added_to_a_text_where_the_file_says_so(
    pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, added: bool
) -> None:
    """Whatever is usual for its rule."""
    describe, end = gguf.GGUFWriter.add_eos_token_id, SMALL.vocab - 1

    def stated(writer: gguf.GGUFWriter, number: int) -> None:
        describe(writer, number)
        writer.add_add_bos_token(added)
        writer.add_add_eos_token(added)

    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", stated)
    for tokenizer in tokenizers_of(scaled_file(tmp_path, pre=pre), tmp_path):
        whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        assert whole == ([end, *plain, end] if added else plain)


def with_template(path: Path, template: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    describe = gguf.GGUFWriter.add_eos_token_id

    def with_templates(writer: gguf.GGUFWriter, number: int) -> None:
        describe(writer, number)
        if template is not None:
            writer.add_chat_template(template)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_eos_token_id", with_templates)
        return write_gguf(path, SMALL, lambda _: "Q8_0")


def test_chat_templates_with_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hermes has one for tools."""
    wanted = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    named = [{"name": name, "template": text} for name, text in wanted.items()]
    path = with_template(tmp_path / "templates.gguf", named, monkeypatch)
    for tokenizer in tokenizers_of(path, tmp_path):
        assert tokenizer.chat_template == wanted
    assert load_tokenizer(Path(locate_safetensors(str(path), print))).chat_template == wanted
    for tokenizer in tokenizers_of(with_template(tmp_path / "tools.gguf", named[1:], monkeypatch), tmp_path):
        assert tokenizer.chat_template is None, "chats without tools would have none"


def test_a_chat_template_goes_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexed again in its folder, a file without a template had that of the file which it replaced."""
    path = with_template(tmp_path / "model.gguf", "{{ messages }}", monkeypatch)
    folder = locate(str(path), print)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages }}"
    other, times = with_template(tmp_path / "other.gguf", None, monkeypatch), path.stat()
    content = other.read_bytes()
    path.write_bytes(content + b"\0" * (times.st_size - len(content)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert locate(str(path), print) == folder
    assert AutoTokenizer.from_pretrained(folder).chat_template is None


def test_words_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.ggml\.pre is viking"):
        locate(str(scaled_file(tmp_path, pre="viking")), print)
