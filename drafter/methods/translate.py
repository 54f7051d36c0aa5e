"""Drafting by a model with another vocabulary than the target's, through text.

The committed tokens are decoded and encoded for the model; the text that the model generates is encoded into the
target's tokens. Any model of the same language can thus draft for any target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafter.interface import Drafter, DraftRequest
from drafter.lockstep import run_in_lockstep
from drafter.methods.model import ModelDrafter, load
from drafter.methods.registry import drafter
from outrider.models.hub import locate
from outrider.models.tokenizer import read_tokenizer
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings

_WINDOW = 1024  # the target's tokens that the model reads; beyond that, the older half is dropped
_CONTEXT = 8  # tokens of context for encoding new text and decoding new tokens
_MODEL_TOKENS_PER_TOKEN = 4  # limit on the model's tokens per token of the target, on average
_PARTIAL = "\ufffd"  # decoded form of an incomplete character
_LAST_WORD = re.compile(r"\s*\S*$")
_GREEDY = SamplingParams(temperature=0.0)


class BareTokenizer:
    """Tokenizer without automatic special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = Vocabulary.of(tokenizer)
        self.eos_id: int | None = tokenizer.eos_token_id
        bos_id: int | None = tokenizer.bos_token_id
        adds_bos = tokenizer("a")["input_ids"][:1] == [bos_id]
        self._pre_tokenizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
        self.prefix = [bos_id] if bos_id is not None and adds_bos else []

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add after others; some decode differently at the start of a text."""
        context = list(before[-_CONTEXT:])
        known = self.decode(context)
        whole = self.decode([*context, *tokens])
        return whole[len(known) :] if whole.startswith(known) else ""

    def encode_after(self, before: Sequence[int], text: str) -> list[int]:
        """Return the tokens of a text that continues others.

        Return none if the text would merge with the tokens before it: these
        are committed, so the target would encode the continuation differently.
        """
        for size in range(min(len(before), _CONTEXT), 0, -1):
            context = list(before[-size:])
            tokens = self.encode(self.decode(context) + text)
            if tokens[:size] == context:
                return tokens[size:]
        return []

    def stable_prefix(self, text: str) -> str:
        """Return all but the last word: further characters cannot change the tokens of this prefix."""
        words = self._pre_tokenizer.pre_tokenize_str(text) if self._pre_tokenizer is not None else []
        if len(words) > 1:
            return text[: words[-1][1][0]]
        last = _LAST_WORD.search(text)
        return text[: last.start()] if last else ""


class TranslatingDrafter:
    """Drafter that wraps a model with another vocabulary."""

    needs_hidden_states = False

    def __init__(self, model: Drafter, own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._model_tokenizer = BareTokenizer(own)
        self._target_tokenizer = BareTokenizer(target)
        self.vocabulary: Vocabulary | None = self._target_tokenizer.vocabulary
        self._window_starts: dict[str, int] = {}  # by session: first token that the model reads

    @property
    def info(self) -> ModelInfo:
        """Return the model's info with the target's vocabulary."""
        target = self._target_tokenizer
        return replace(
            self._model.info,
            vocab_size=len(target.vocabulary.tokens),
            vocabulary_digest=target.vocabulary.digest,
            eos_token_ids=() if target.eos_id is None else (target.eos_id,),
        )

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        sessions = {request.session: self._steps(request) for request in requests}
        drafts = run_in_lockstep(sessions, self._run_model)
        return [drafts[request.session] for request in requests]

    def forget(self, session: str) -> None:
        self._window_starts.pop(session, None)
        self._model.forget(session)

    def _run_model(self, requests: dict[str, DraftRequest]) -> dict[str, Guess]:
        return dict(zip(requests, self._model.draft(list(requests.values())), strict=True))

    def _steps(self, request: DraftRequest) -> Generator[DraftRequest, Guess, Guess]:
        """Yield the requests for the model, one token each; return the draft in the target's tokens."""
        if not request.room:
            return request.chain(done=True)
        tokens = yield from self._translated(request, self._context(request))
        tokens = tokens[: request.room]
        return request.allowed(request.chain(tokens, done=len(tokens) < request.max_new_tokens))

    def _context(self, request: DraftRequest) -> list[int]:
        """Return the committed and guessed text in the model's tokens; none if the model cannot continue it."""
        limit = self._model.info.context_length - _MODEL_TOKENS_PER_TOKEN * (request.max_new_tokens + 2)
        start = self._window_starts.get(request.session, 0)
        while True:
            if len(request.tokens) - start > _WINDOW:
                start = len(request.tokens) - _WINDOW // 2
            text = self._target_tokenizer.decode(request.tokens[start:])
            context = self._model_tokenizer.prefix + self._model_tokenizer.encode(text)
            if len(context) <= limit or len(request.tokens) - start < 2:
                break
            start += (len(request.tokens) - start) // 2
        self._window_starts[request.session] = start
        # An incomplete character at the end has no encoding that the model could continue.
        return [] if len(context) > limit or text.endswith(_PARTIAL) else context

    def _translated(self, request: DraftRequest, context: list[int]) -> Generator[DraftRequest, Guess, list[int]]:
        """Return the target's tokens for what the model generates after `context`."""
        generated: list[int] = []
        tokens: list[int] = []
        text = ""
        limit = _MODEL_TOKENS_PER_TOKEN * (request.max_new_tokens + 1)
        while context and len(tokens) < request.max_new_tokens and len(generated) < limit:
            guess = yield _model_request(request, context, generated)
            if not guess.tokens:
                if guess.done:
                    break
                continue  # the model's prefill is not complete
            if guess.tokens[0] in self._model.info.eos_token_ids:
                return self._final_tokens(request, context, generated)
            generated.append(guess.tokens[0])
            text = self._model_tokenizer.decode_after(context, generated).split(_PARTIAL)[0]
            tokens = self._encode(request, self._target_tokenizer.stable_prefix(text))
        if len(generated) >= limit:
            # One long word, or a language without spaces: all tokens but the last are likely right.
            tokens = tokens or self._encode(request, text)[:-1]
        return tokens

    def _final_tokens(self, request: DraftRequest, context: list[int], generated: list[int]) -> list[int]:
        """Return the tokens of the complete text, with the target's end token: the last word cannot change any more."""
        text = self._model_tokenizer.decode_after(context, generated)
        tokens = self._encode(request, text.split(_PARTIAL)[0])
        complete = bool(tokens or not generated) and _PARTIAL not in text
        eos_id = self._target_tokenizer.eos_id
        return [*tokens, eos_id] if complete and eos_id is not None else tokens

    def _encode(self, request: DraftRequest, text: str) -> list[int]:
        tokens = self._target_tokenizer.encode_after(request.tokens, text) if text else []
        unknown = (i for i, token in enumerate(tokens) if token >= request.vocab_size)
        return tokens[: next(unknown, len(tokens))]


def _model_request(request: DraftRequest, context: list[int], generated: list[int]) -> DraftRequest:
    return DraftRequest(
        session=request.session,
        tokens=context + generated,
        committed=len(context) + len(generated),
        prompt_length=len(context),
        max_new_tokens=1,
        params=_GREEDY,
        vocab_size=2**31,
        cache_salt=request.cache_salt,
    )


def load_target_tokenizer(name: str, progress: Callable[[str], None]) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer; a directory needs no other files."""
    place = name if Path(name).is_dir() else locate(name, progress)
    try:
        return read_tokenizer(place)
    except (OSError, ValueError, KeyError) as error:
        message, limit = f"cannot load the target's tokenizer {name!r}: {error}", "a directory, a hub id or 'default'"
        raise StartupError(message, field="target", value=name, limit=limit) from error


@drafter("translate")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter | TranslatingDrafter:
    """Make a drafter of a model with another vocabulary than the target's."""
    drafter, loaded = load(settings, progress)
    target = load_target_tokenizer(settings.target, progress)
    if Vocabulary.of(target) == loaded.vocabulary:
        return drafter
    return TranslatingDrafter(drafter, loaded.tokenizer, target)
