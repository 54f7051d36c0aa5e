"""From tokens to text: whole characters, spaces as they are, nothing past a stop string."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from coordinator.sessions.detokenizer import Detokenizer, TextPiece, TextStream
from outrider.testing.toy_models import EOS, byte_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
CURIOSITIES = [
    "👩‍👩‍👧‍👦",
    "🇫🇷🇩🇪",
    "👍🏽",
    "e\N{COMBINING ACUTE ACCENT}",
    "ก็",
    "한국어",
    "שלום",
    "\N{ZERO WIDTH SPACE}",
    "  ",
    " ",
    "\n",
    "\r\n\t",
    "x",
    "𝕆𝕦𝕥",
    "\N{NO-BREAK SPACE}",
]
unicode_texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(st.sampled_from(CURIOSITIES), max_size=8).map("".join),
).filter(lambda text: BROKEN not in text and EOS not in text)  # hypothesis tries constants of the code; EOS has no text


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@functools.cache
def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of several letters, some of which start with a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the end of the stop string, the end of the 👩‍👩‍👧 story"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS)


@functools.cache
def spacing_tokenizer() -> PreTrainedTokenizerFast:
    """As sentencepiece models do: a leading space belongs to the word and vanishes at the start of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["▁", "▁the", "▁end", "s", "the", "▁of"]
    vocab = {token: i for i, token in enumerate([*words, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS)


TOKENIZERS = {"bytes": tokenizer, "merges": merging_tokenizer, "spaces": spacing_tokenizer}


def decoding(made: PreTrainedTokenizerFast):
    """As coordinator/workers/target.py decodes."""
    return lambda tokens: made.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


decode = decoding(byte_tokenizer())


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False, split_special_tokens=True)  # which a text may spell


def detokenised(prompt: Sequence[int], tokens: Sequence[int], decode=decode) -> list[str]:
    """Piece by piece, and the rest."""
    detokenizer = Detokenizer(decode, prompt)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.rest()]


# --- characters ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(prompt=unicode_texts, text=unicode_texts)
def test_the_pieces_are_the_text_and_never_broken(prompt: str, text: str) -> None:
    pieces = detokenised(ids(prompt), ids(text))
    assert "".join(pieces) == text
    assert BROKEN not in "".join(pieces[:-1])


@settings(max_examples=100, deadline=None)
@given(prompt=unicode_texts, text=unicode_texts, data=st.data())
def test_every_piece_is_out_as_soon_as_its_character_is_whole(prompt: str, text: str, data: st.DataObject) -> None:
    tokens = ids(text)
    cut = data.draw(st.integers(0, len(tokens)))
    so_far = "".join(detokenised(ids(prompt), tokens[:cut])[:-1])
    whole = bytes(text, "utf-8")[:cut].decode("utf-8", "ignore")
    assert so_far == whole


@settings(max_examples=100, deadline=None)
@given(text=st.text("the nds of👩‍\n", max_size=40), prompt=st.text("the end", max_size=12), split=st.integers(0, 12))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_tokenizers_pieces_add_up_to_its_own_decoding(kind: str, text: str, prompt: str, split: int) -> None:
    made = TOKENIZERS[kind]()
    tokens = made.encode(prompt + text, add_special_tokens=False)
    split = min(split, len(tokens))
    both = decoding(made)
    if both(tokens[:split]).endswith(BROKEN):
        return  # a prompt is whole text
    assert both(tokens[:split]) + "".join(detokenised(tokens[:split], tokens[split:], both)) == both(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["the end 👩", "the 👩👩", "한국어 한국어", "👩" * 20, "the end é"])
def test_a_character_after_a_prompt_of_such_characters_is_whole(kind: str, prompt: str) -> None:
    """Decoders with byte fallback show a whole run of bytes as broken when it starts inside a character: as much of
    the prompt must be looked at as makes sense by itself."""
    made = TOKENIZERS[kind]()
    before = made.encode(prompt, add_special_tokens=False)
    after = made.encode(prompt + "👩 of", add_special_tokens=False)[len(before) :]
    assert "".join(detokenised(before, after, decoding(made))) == "👩 of"


@pytest.mark.parametrize("start", [" leading", "  two", "   ", "\n\n", " "])
def test_leading_spaces_are_kept(start: str) -> None:
    assert "".join(detokenised(ids("prompt"), ids(start))) == start
    made = merging_tokenizer()
    assert "".join(detokenised([], made.encode(start), decoding(made))) == start


def test_special_tokens_are_not_text() -> None:
    end = tokenizer().eos_token_id
    assert detokenised(ids("a"), [*ids("b"), end, *ids("c")]) == ["b", "", "c", ""]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=80))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_shows_them(tokens: list[int]) -> None:
    """Random models and hostile guesses say such things."""
    assert "".join(detokenised(ids("x"), tokens)) == decode(tokens)


def test_a_long_run_of_broken_bytes_does_not_swallow_the_character_after_it() -> None:
    """What is held back is given up after a while, but never in the middle of what may yet become a character."""
    stray = ids("é")[1]
    for count in range(28, 36):
        tokens = [stray] * count + ids("😀 fine")
        assert "".join(detokenised(ids("x"), tokens)) == decode(tokens)


def test_a_prompt_that_ends_inside_a_character_is_continued() -> None:
    """A prompt may be given as tokens: the rest of its last character is output."""
    first, *rest = ids("é!")
    assert "".join(detokenised([*ids("caf"), first], rest)).endswith("!")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("inside", range(1, 8))
def test_what_follows_a_prompt_that_ends_inside_a_character_is_whole(kind: str, inside: int) -> None:
    """Of bytes that have become characters there are fewer than of broken ones: output was lost for them."""
    made = TOKENIZERS[kind]()
    tokens = made.encode("the 👩👩 of the", add_special_tokens=False)
    after = made.encode(" of the", add_special_tokens=False)
    split = max(0, len(tokens) - len(after) - inside)
    assert "".join(detokenised(tokens[:split], tokens[split:], decoding(made))).endswith(" of the")


# --- stop strings ----------------------------------------------------------------------------------------------------


def streamed(text: str, stops: Sequence[str], prompt: str = "prompt") -> tuple[str, str, list[str]]:
    """Text, the stop string that ended it, and the pieces."""
    stream = TextStream(decode, ids(prompt), stops)
    pieces: list[str] = []
    for token in ids(text):
        piece = stream.add(token)
        pieces.append(piece.text)
        if piece.stop:
            return "".join(pieces), piece.stop, pieces
    last = stream.end()
    return "".join(pieces) + last.text, last.stop, [*pieces, last.text]


@pytest.mark.parametrize(
    ("text", "stops", "wanted", "stop"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("one STO two", ["STOP"], "one STO two", ""),
        ("one STO", ["STOP"], "one STO", ""),
        ("STOP", ["STOP"], "", "STOP"),
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("x\n\ny", ["\n\n"], "x", "\n\n"),
        ("x\ny", ["\n\n"], "x\ny", ""),
        ("abcd", ["cd", "bc"], "a", "bc"),
        ("abcd", ["abcd", "bcx"], "", "abcd"),
        ("say 👍 now", ["👍"], "say ", "👍"),
        ("é", ["e"], "é", ""),
        ("a.b", ["."], "a", "."),
        ("nothing", [], "nothing", ""),
        ("no", ["<|end|>", "no!"], "no", ""),
    ],
)
def test_stop_strings(text: str, stops: list[str], wanted: str, stop: str) -> None:
    assert streamed(text, stops)[:2] == (wanted, stop)


@pytest.mark.parametrize("stops", [["cd", "bc"], ["bc", "cd"], ["d", "bcd", "bc"]])
def test_of_two_stop_strings_in_one_token_the_earlier_ends_the_text(stops: list[str]) -> None:
    words = ["x", "abcd"]
    piece = TextStream(lambda tokens: "".join(words[token] for token in tokens), [0], stops).add(1)
    assert piece == TextPiece("a", "bc")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    _, _, pieces = streamed("xSTySTO", ["STOP"])
    assert pieces == ["x", "", "", "STy", "", "", "", "STO"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_special_token_releases_what_is_held_back(kind: str) -> None:
    made = TOKENIZERS[kind]()
    before, after = (made.encode(text, add_special_tokens=False) for text in ("the the", " s"))
    tokens, both = [*before, made.eos_token_id, *after], decoding(made)
    stream = TextStream(both, [], ["the s"])
    pieces = [stream.add(token) for token in tokens]
    out = "".join(piece.text for piece in pieces[: len(before) + 1])
    assert out == both(before), "all text before the special token comes with it"
    assert not any(piece.stop for piece in pieces), "a stop string does not reach across it"
    assert "".join(piece.text for piece in pieces) + stream.end().text == both(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_is_complete_across_ordinary_tokens(kind: str) -> None:
    made = TOKENIZERS[kind]()
    stream = TextStream(decoding(made), [], ["the s"])
    pieces = [stream.add(token) for token in made.encode("of the s", add_special_tokens=False)]
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == decoding(made)(made.encode("of ", add_special_tokens=False))
    assert pieces[-1].stop == "the s"


def test_a_special_token_with_nothing_held_back_adds_no_text() -> None:
    stream = TextStream(decode, ids("p"), ["STOP"])
    tokens = [*ids("x"), tokenizer().eos_token_id, *ids("STOP")]
    pieces = [stream.add(token) for token in tokens]
    assert [piece.text for piece in pieces] == ["x", "", "", "", "", ""]
    assert pieces[-1].stop == "STOP"


def test_a_stop_string_is_found_although_a_longer_one_was_hoped_for() -> None:
    assert streamed("abx", ["abc", "b"])[:2] == ("a", "b")


def test_a_stop_string_inside_one_token_is_found() -> None:
    made = merging_tokenizer()
    both = decoding(made)
    stream = TextStream(both, [], ["d o"])
    text = ""
    for token in made.encode("the end of the story"):
        piece = stream.add(token)
        text += piece.text
        if piece.stop:
            break
    assert (text, piece) == ("the en", TextPiece(piece.text, "d o"))


def test_the_prompt_is_not_searched() -> None:
    assert streamed("P now", ["STOP"], prompt="say STO")[:2] == ("P now", "")


def test_a_stop_string_that_only_the_rest_completes_is_found() -> None:
    """The last bytes are broken and come out at the end alone."""
    stream = TextStream(decode, [], ["a" + BROKEN])
    for token in [*ids("ba"), ids("é")[0]]:
        assert stream.add(token).stop == ""
    assert stream.end() == TextPiece("", "a" + BROKEN)


class Compared(str):
    """A stop string that counts how many of its beginnings are compared."""

    beginnings = 0

    def __getitem__(self, part: SupportsIndex | slice) -> str:
        Compared.beginnings += 1
        return super().__getitem__(part)


def test_long_stop_strings_do_not_make_every_token_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held back may be as long as one of them; the other sessions wait while it is compared with all."""
    monkeypatch.setattr(Compared, "beginnings", 0)
    stops = [Compared(text) for text in ("a" * 511 + "b", "c" * 512, "a" * 255 + "b" * 257, "a" * 100 + "ca" * 200)]
    stream, tokens = TextStream(decode, ids("p"), stops), ids("a" * 2000)
    assert not any(stream.add(token).stop for token in tokens)
    assert stream.pending == "a" * 511
    assert Compared.beginnings <= 2 * len(stops) * len(tokens)


stop_lists = st.lists(st.text("ab\n é", min_size=1, max_size=4), max_size=3)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=4))
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop_string(text: str, stops: list[str]) -> None:
    stream, out = TextStream(decode, ids("p"), stops), ""
    for token in ids(text):
        piece = stream.add(token)
        out += piece.text
        if piece.stop:
            assert text.startswith(out + piece.stop)
            break
        said = out + stream.pending
        begun = [n for stop in stops for n in range(1, len(stop)) if said.endswith(stop[:n])]
        assert len(stream.pending) == max(begun, default=0)
        assert not any(stop in said for stop in stops)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab\n é", max_size=25), stops=stop_lists)
def test_nothing_past_the_first_stop_string_gets_out(text: str, stops: list[str]) -> None:
    out, stop, _ = streamed(text, stops)
    complete = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not complete:
        assert (out, stop) == (text, "")
        return
    first_end = min(complete)[0]
    assert stop in stops
    assert text.startswith(out + stop)
    assert len(out + stop) == first_end, "the stop string that is complete first ends the text"
    assert not any(s in out for s in stops)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é", max_size=20), stops=stop_lists, seed=st.integers(0, 99))
def test_what_is_out_after_n_tokens_depends_on_these_tokens_alone(text: str, stops: list[str], seed: int) -> None:
    """A stream that is resumed at any token gives the same pieces from there on."""
    tokens = ids(text)
    stream = TextStream(decode, ids("p"), stops)
    whole: list[TextPiece] = []
    for token in tokens:
        whole.append(stream.add(token))
        if whole[-1].stop:
            break
    again = TextStream(decode, ids("p"), stops)
    cut = random.Random(seed).randint(0, len(whole))
    replayed = [again.add(token) for token in tokens[:cut]]
    assert replayed == whole[:cut]
    assert [again.add(token) for token in tokens[cut : len(whole)]] == whole[cut:]
