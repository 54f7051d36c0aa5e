"""Drafting through text: what is said in one vocabulary, told in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from drafter.interface import DraftRequest
from drafter.methods.model import ModelDrafter
from drafter.methods.registry import make
from drafter.methods.translate import TranslatingDrafter
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import WHOLE, Distribution, Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.testing.toy_models import EOS, byte_tokenizer, make_model
from tests.conftest import Models
from tests.models import permuted_vocabulary

TEXT = (
    "The lighthouse keeper counted ships. Three ships in the morning, three ships at night: naïve, isn't it? "
    "Größe und Güte 🙂🙂 and the keeper counted, and the ships went by.\n\nThe end of the night."
)


def learnt(size: int, corpus: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([corpus] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


BYTES = byte_tokenizer()
LETTERS = BYTES.tokenize("".join(map(chr, range(32, 127))))
SHORT = learnt(300, TEXT)
LONG = learnt(900, TEXT + " The morning ships went by, three and three. Counted ships, counted nights.")
TONGUES = {"bytes": BYTES, "short": SHORT, "long": LONG}


class Says:
    """A model that knows one text; what follows anything else it does not know."""

    needs_hidden_states = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, context: int = 4096, slow: int = 0) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._slow = slow
        self.requests: list[DraftRequest] = []
        self.forgotten: list[str] = []
        self.vocabulary: Vocabulary | None = Vocabulary.of(tokenizer)
        self.info = ModelInfo(
            "says",
            "fingerprint",
            vocab_size=len(tokenizer),
            vocabulary_digest=self.vocabulary.digest,
            context_length=context,
            eos_token_ids=(tokenizer.eos_token_id,),
        )

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        return [self._draft(request) for request in requests]

    def forget(self, session: str) -> None:
        self.forgotten.append(session)

    def _draft(self, request: DraftRequest) -> Guess:
        self.requests.append(request)
        if self._slow:
            self._slow -= 1
            return request.chain()
        read = self._tokenizer.decode(request.tokens)
        at = self._text.find(read.rstrip("\ufffd"))
        if at < 0 or len(request.tokens) >= self.info.context_length:
            return request.chain(done=True)
        # In tokens of the whole: a character may be under way.
        tokens = self._tokenizer.encode(self._text[at : at + len(read) + 50], add_special_tokens=False)
        if request.tokens != tokens[: len(request.tokens)]:
            tokens = [
                *request.tokens,
                *self._tokenizer.encode(self._text[at + len(read) :][:50], add_special_tokens=False),
            ]
        tokens.append(self._tokenizer.eos_token_id)
        return request.chain([tokens[len(request.tokens)]])


def ask_for(tokens: list[int], max_new_tokens: int = 4, **more) -> DraftRequest:
    vocab_size = more.pop("vocab_size", 10_000)
    return DraftRequest(
        "s", tokens, len(tokens), 1, max_new_tokens, SamplingParams(**({"temperature": 0.0} | more)), vocab_size
    )


def drafter_for(own: str, target: str, text: str = TEXT, **more) -> TranslatingDrafter:
    return TranslatingDrafter(Says(TONGUES[own], text, **more), TONGUES[own], TONGUES[target])


PAIRS = [("bytes", "long"), ("long", "bytes"), ("short", "long"), ("long", "short"), ("bytes", "short")]


@pytest.mark.parametrize(("own", "target"), PAIRS)
def test_the_text_is_told_in_the_targets_tokens(own: str, target: str) -> None:
    truth = TONGUES[target].encode(TEXT)
    drafter = drafter_for(own, target)
    right = wrong = silent = 0
    for at in range(3, len(truth) - 6):
        draft = drafter.draft([ask_for(truth[:at])])[0]
        right += draft.tokens == tuple(truth[at : at + len(draft.tokens)]) and bool(draft.tokens)
        wrong += draft.tokens != tuple(truth[at : at + len(draft.tokens)])
        silent += not draft.tokens
        assert len(draft.tokens) <= 4
    assert wrong == 0
    assert right > 0.75 * (right + silent), "silent only within characters, and where words would merge"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_what_is_drafted_spells_what_the_model_says(data: st.DataObject, pair: tuple[str, str]) -> None:
    """However strangely the committed text was split, and wherever it ends."""
    own, target = pair
    data_bytes = TEXT.encode()
    end = data.draw(st.integers(1, len(data_bytes) - 40))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, end - 1)), max_size=6)))
    tokens: list[int] = []
    for start, stop in zip([0, *cuts], [*cuts, end], strict=True):
        piece = data_bytes[start:stop]
        try:
            tokens += TONGUES[target].encode(piece.decode())
        except UnicodeDecodeError:
            tokens += [TONGUES[target].convert_tokens_to_ids(LETTER[byte]) for byte in piece]
    draft = drafter_for(own, target).draft([ask_for(tokens)])[0]
    if draft.tokens:
        spelt = TONGUES[target].decode([*tokens, *draft.tokens])
        assert TEXT.startswith(spelt.rstrip("\ufffd")), "the last character may be cut short by room"


LETTER = dict(enumerate(BYTES.tokenize(bytes(range(128)).decode())))
LETTER |= {
    byte: letter
    for text in (chr(code) for code in [*range(128, 2048), *range(0x1F600, 0x1F650), 0xFFFD])
    for byte, letter in zip(text.encode(), BYTES.tokenize(text), strict=True)
}


def test_a_character_that_is_not_whole_is_not_guessed_at() -> None:
    tokens = BYTES.encode("counted 🙂")
    request = ask_for(tokens[:-1])
    assert drafter_for("long", "bytes").draft([request])[0] == request.chain(done=True)
    text = "smile 🙂🙂🙂 twice"
    half = drafter_for("bytes", "bytes", text, slow=0)
    half._model._draft = lambda request: (
        request.chain([BYTES.encode("🙂")[len(request.tokens) - 6]])
        if len(request.tokens) < 9
        else request.chain(done=True)
    )  # type: ignore[method-assign]
    assert half.draft([ask_for(BYTES.encode("smile "))])[0].tokens == ()


def test_nothing_is_guessed_that_would_merge_with_what_is_committed() -> None:
    (whole,) = LONG.encode(" ships")
    assert LONG.encode(" shi") != [whole]
    tokens = [*LONG.encode("The lighthouse keeper counted"), *LONG.encode(" shi")]
    draft = drafter_for("long", "long").draft([ask_for(tokens)])[0]
    spelt = LONG.decode([*tokens, *draft.tokens])
    assert TEXT.startswith(spelt)
    assert LONG.encode("ps")[0] not in draft.tokens[:1] or LONG.encode(" shi" + "ps") == LONG.encode(
        " shi"
    ) + LONG.encode("ps")


def test_a_word_waits_for_its_letters() -> None:
    """A model of letters, a target of words: half a word is no word."""
    for max_new_tokens in (1, 2, 3):
        draft = drafter_for("bytes", "long").draft([ask_for(LONG.encode("The lighthouse"), max_new_tokens)])[0]
        assert draft.tokens
        assert draft.tokens == tuple(LONG.encode(" keeper counted ships")[: len(draft.tokens)])


def test_a_language_without_spaces_is_drafted_too() -> None:
    text = "灯塔看守人数着船只三艘在早晨三艘在夜里灯塔看守人数着船只"
    truth = BYTES.encode(text)
    draft = drafter_for("long", "bytes", text).draft([ask_for(truth[:15], 4)])[0]
    assert draft.tokens == tuple(truth[15:19])


def test_the_end_is_told_with_the_targets_own_token() -> None:
    draft = drafter_for("bytes", "long").draft([ask_for(LONG.encode(TEXT[: -len(" the night.")]), max_new_tokens=9)])[0]
    assert draft.tokens == (*LONG.encode(" the night."), LONG.eos_token_id)
    assert draft.done


def test_open_guesses_are_read_too() -> None:
    tokens = LONG.encode("The lighthouse keeper counted")
    known = Guess(2, 0, 0, tuple(tokens[2:]))
    request = DraftRequest("s", tokens, 2, 1, 1, SamplingParams(temperature=0.0), 10_000, open_guess=known)
    assert drafter_for("short", "long").draft([request])[0].tokens == (*tokens[2:], *LONG.encode(" ships"))


def test_under_block_and_rejection_a_guess_is_certain_of_itself() -> None:
    request = ask_for(LONG.encode("The lighthouse"), 1, temperature=1.0, verification=Verification.BLOCK)
    (token,) = LONG.encode(" keeper")
    assert drafter_for("short", "long").draft([request])[0] == request.chain(
        [token], [Distribution((token,), (WHOLE,))]
    )


def test_ids_that_the_target_has_not_are_left_out() -> None:
    tokens = LONG.encode("The lighthouse")
    (keeper,) = LONG.encode(" keeper")
    assert drafter_for("short", "long").draft([ask_for(tokens, vocab_size=keeper)])[0].tokens == ()


def test_sessions_write_side_by_side_and_a_slow_start_is_waited_for() -> None:
    drafter = drafter_for("short", "long", slow=3)
    starts = ["The lighthouse", "The lighthouse keeper counted", "not in the text"]
    requests = [
        DraftRequest(start, LONG.encode(start), len(LONG.encode(start)), 1, 1, SamplingParams(temperature=0.0), 10_000)
        for start in starts
    ]
    drafts = drafter.draft(requests)
    assert [LONG.decode(draft.tokens) for draft in drafts] == [" keeper", " ships", ""]
    assert drafts[2].done


def test_a_long_text_is_read_from_a_place_that_stays_until_it_must_move() -> None:
    """So that what the model has cached stays of use."""
    text = "".join(f"{n} ships, " for n in range(1000))
    drafter = drafter_for("long", "bytes", text)
    inner = drafter._model
    assert isinstance(inner, Says)
    truth = BYTES.encode(text)
    starts = []
    for at in range(2500, 3600, 50):
        draft = drafter.draft([ask_for(truth[:at], 3)])[0]
        assert draft.tokens == tuple(truth[at : at + 3])
        starts.append(drafter._window_starts["s"])
        assert at - starts[-1] <= 1024
    assert len(set(starts)) <= 3
    drafter.forget("s")
    assert not drafter._window_starts
    assert inner.forgotten == ["s"]


def test_a_model_of_short_context_reads_less() -> None:
    text = "".join(f"{n} ships, " for n in range(1000))
    drafter = drafter_for("bytes", "long", text, context=300)
    truth = LONG.encode(text)
    for at in range(500, 700, 25):
        draft = drafter.draft([ask_for(truth[:at], 2)])[0]
        assert draft.tokens == tuple(truth[at : at + 2])
    assert all(len(request.tokens) < 300 for request in drafter._model.requests)  # type: ignore[attr-defined]


def test_it_presents_the_targets_vocabulary_and_its_own_fingerprint() -> None:
    drafter = drafter_for("short", "long")
    assert drafter.vocabulary == Vocabulary.of(LONG)
    info = drafter.info
    assert (info.vocabulary_digest, info.vocab_size) == (Vocabulary.of(LONG).digest, len(LONG))
    assert (info.fingerprint, info.eos_token_ids) == ("fingerprint", (LONG.eos_token_id,))


# --- made from settings ----------------------------------------------------------------------------------------------


def made(model: Path, tokenizer: object):
    settings = DrafterSettings(kind="translate", model=str(model), device="cpu", target=str(tokenizer))
    return make(settings, lambda _: None)


def test_a_model_with_the_targets_vocabulary_needs_no_translation(models: Models) -> None:
    assert isinstance(made(models.draft, models.target), ModelDrafter)


@pytest.mark.parametrize("letters", [None, LETTERS], ids=["bytes", "letters"])
def test_a_real_model_of_other_ids_says_what_the_same_model_says(tmp_path: Path, letters: list[str] | None) -> None:
    """Bytes that are no character cannot be told; a model of letters says none."""
    own = make_model(tmp_path / "own", seed=7, sharpness=4.0, letters=letters)
    drafter, plain = made(permuted_vocabulary(tmp_path / "other", own), own), made(own, own)
    assert isinstance(drafter, TranslatingDrafter)
    assert drafter.info.vocabulary_digest == plain.info.vocabulary_digest
    assert drafter._model.info.vocabulary_digest != plain.info.vocabulary_digest
    tokenizer = byte_tokenizer(letters=letters)
    for start in ("ships at night", "the keeper", "night of the ships", "and went by the light", "3 ships", "x"):
        request = ask_for(tokenizer.encode(start), 1, vocab_size=len(tokenizer))
        told, wanted = (each.draft([request])[0].tokens for each in (drafter, plain))
        assert len(wanted) == 1
        assert told == wanted or (told == () and not letters)


def test_a_tokenizer_that_is_not_there_is_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="tokenizer"):
        made(models.draft, tmp_path)


def test_a_full_tree_is_not_continued() -> None:
    truth = TONGUES["long"].encode(TEXT)
    drafter = drafter_for("bytes", "long")
    committed, ahead = truth[:12], truth[12:20]
    request = ask_for(committed)
    full = replace(request, tokens=[*committed, *ahead], open_guess=request.chain(ahead), depth=8)
    (guess,) = drafter.draft([full])
    assert guess.done
    assert guess.tokens == tuple(ahead)
    assert len(drafter.draft([replace(full, depth=9)])[0].tokens) <= 9
