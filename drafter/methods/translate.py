"""A model that speaks another vocabulary than the target drafts all the same: through text.

What is committed is decoded and read by the model in its own tokens; what the
model says to that is decoded and split into the target's. Any model that
writes the same language can so draft for any target. Kind `model` does this
when it is told the target's tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from drafter.grammar_filter import lawful
from drafter.interface import Drafter, DraftRequest, DraftResult
from drafter.methods.model import ModelDrafter, load
from drafter.methods.registry import drafter
from drafter.settings import DrafterSettings
from outrider.models.hub import locate
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import WHOLE, Distribution
from outrider.protocol.vocabulary import Vocabulary

_WINDOW = 1024  # the target's tokens that the model reads at most; when they are more, the older half is left out
_CONTEXT = 8  # tokens of context in which new text is split, and new tokens are spelt
_OWN_PER_TOKEN = 4  # the model's tokens that a token of the target's may take, on average
_PARTIAL = "\ufffd"  # what part of a character decodes to
_LAST_WORD = re.compile(r"\s*\S*$")
_LIKELIEST = SamplingParams(temperature=0.0)


class BareTokenizer:
    """A tokenizer, without what it adds of its own accord."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = Vocabulary.of(tokenizer)
        self.end: int | None = tokenizer.eos_token_id
        start: int | None = tokenizer.bos_token_id
        begins = tokenizer("a")["input_ids"][:1] == [start]
        self._words = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
        self.start = [start] if start is not None and begins else []

    def read(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spell(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def spell_behind(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """What tokens add to a text; some spell differently at the start of one."""
        context = list(before[-_CONTEXT:])
        known = self.spell(context)
        whole = self.spell([*context, *tokens])
        return whole[len(known) :] if whole.startswith(known) else ""

    def split_behind(self, before: Sequence[int], text: str) -> list[int]:
        """The tokens of a text that goes on behind others. None if it would merge with them: those are committed, and
        no tokens behind them spell it then as the target would."""
        for size in range(min(len(before), _CONTEXT), 0, -1):
            context = list(before[-size:])
            tokens = self.read(self.spell(context) + text)
            if tokens[:size] == context:
                return tokens[size:]
        return []

    def settled(self, text: str) -> str:
        """What more letters cannot change: all but the last word, as this tokenizer sees words."""
        words = self._words.pre_tokenize_str(text) if self._words is not None else []
        if len(words) > 1:
            return text[: words[-1][1][0]]
        last = _LAST_WORD.search(text)
        return text[: last.start()] if last else ""


@dataclass(slots=True)
class _Writing:
    """One ask on its way through the other language."""

    ask: DraftRequest
    own: list[int]  # what the model has read, in its own tokens
    said: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the target's, so far
    over: bool = False

    @property
    def own_ask(self) -> DraftRequest:
        return DraftRequest(
            session=self.ask.session,
            tokens=self.own + self.said,
            committed=len(self.own),
            prompt_length=len(self.own),
            room=1,
            params=_LIKELIEST,
            vocab_size=2**31,
            cache_salt=self.ask.cache_salt,
        )


class TranslatingDrafter:
    wants_features = False

    def __init__(self, inner: Drafter, own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
        self._inner = inner
        self._own = BareTokenizer(own)
        self._target = BareTokenizer(target)
        self.vocabulary: Vocabulary | None = self._target.vocabulary
        self._from: dict[str, int] = {}  # where in each session the model begins to read

    @property
    def info(self) -> ModelInfo:
        """The model's own, but that it takes and gives the target's tokens."""
        return replace(
            self._inner.info,
            vocab_size=len(self._target.vocabulary.tokens),
            vocabulary_digest=self._target.vocabulary.digest,
            eos_token_ids=() if self._target.end is None else (self._target.end,),
        )

    def draft(self, asks: Sequence[DraftRequest]) -> list[DraftResult]:
        writings = [self._begin(ask) for ask in asks]
        while unfinished := [writing for writing in writings if not writing.over]:
            drafts = self._inner.draft([writing.own_ask for writing in unfinished])
            for writing, draft in zip(unfinished, drafts, strict=True):
                self._go_on(writing, draft)
        return [lawful(writing.ask, _answer(writing)) for writing in writings]

    def forget(self, session: str) -> None:
        self._from.pop(session, None)
        self._inner.forget(session)

    def _begin(self, ask: DraftRequest) -> _Writing:
        limit = self._inner.info.context_length - _OWN_PER_TOKEN * (ask.room + 2)
        start = self._from.get(ask.session, 0)
        while True:
            if len(ask.tokens) - start > _WINDOW:
                start = len(ask.tokens) - _WINDOW // 2
            text = self._target.spell(ask.tokens[start:])
            own = self._own.start + self._own.read(text)
            if len(own) <= limit or len(ask.tokens) - start < 2:
                break
            start += (len(ask.tokens) - start) // 2
        self._from[ask.session] = start
        # Nobody can go on behind half a character.
        return _Writing(ask, own, over=not own or len(own) > limit or text.endswith(_PARTIAL))

    def _go_on(self, writing: _Writing, draft: DraftResult) -> None:
        if not draft.tokens:
            writing.over = draft.done  # if not, the model has not read everything yet
            return
        (token,) = draft.tokens[:1]
        if token in self._inner.info.eos_token_ids:
            writing.over = True
            writing.tokens = self._to_the_end(writing)
            return
        writing.said.append(token)
        text = self._own.spell_behind(writing.own, writing.said).split(_PARTIAL)[0]
        writing.tokens = self._split(writing, self._target.settled(text))
        if len(writing.said) >= _OWN_PER_TOKEN * (writing.ask.room + 1):
            writing.over = True
            # One long word, or a language that has no spaces: all but the last is a fair guess.
            writing.tokens = writing.tokens or self._split(writing, text)[:-1]
        writing.over |= len(writing.tokens) >= writing.ask.room

    def _to_the_end(self, writing: _Writing) -> list[int]:
        """The model has no more to say: nothing will change its last word."""
        text = self._own.spell_behind(writing.own, writing.said)
        tokens = self._split(writing, text.split(_PARTIAL)[0])
        told = bool(tokens or not writing.said) and _PARTIAL not in text
        return [*tokens, self._target.end] if told and self._target.end is not None else tokens

    def _split(self, writing: _Writing, text: str) -> list[int]:
        tokens = self._target.split_behind(writing.ask.tokens, text) if text else []
        unknown = (i for i, token in enumerate(tokens) if token >= writing.ask.vocab_size)
        return tokens[: next(unknown, len(tokens))]


def _answer(writing: _Writing) -> DraftResult:
    tokens = tuple(writing.tokens[: writing.ask.room])
    probs: tuple[Distribution, ...] = ()
    if writing.ask.params.mode.needs_draft_probs:
        probs = tuple(Distribution((token,), (WHOLE,)) for token in tokens)
    return DraftResult(tokens, probs, done=len(tokens) < writing.ask.room)


def load_target_tokenizer(name: str, progress: Callable[[str], None]) -> PreTrainedTokenizerBase:
    """A directory needs to hold no more than the tokenizer."""
    place = name if Path(name).is_dir() else locate(name, progress)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(
            f"cannot load the target's tokenizer {name!r}: {error}",
            field="target",
            value=name,
            limit="a directory, a hub id or 'default'",
        ) from error
    return tokenizer


@drafter("translate")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter | TranslatingDrafter:
    """Make a drafter of a model with another vocabulary than the target's."""
    drafter, loaded = load(settings, progress)
    target = load_target_tokenizer(settings.target, progress)
    if Vocabulary.of(target) == loaded.vocabulary:
        return drafter
    return TranslatingDrafter(drafter, loaded.tokenizer, target)
