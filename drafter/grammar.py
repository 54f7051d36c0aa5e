"""What a session's grammar lets a drafter guess.

The verifier's word is the truth, and guesses against the grammar cost time
only: where a grammar cannot be followed here, guesses are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import structlog
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from drafter.settings import DrafterSettings
from outrider.models.hub import DEFAULT, DEFAULT_NAME, default_path, locate
from outrider.models.tokenizer import as_json
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.vocabulary import Vocabulary
from outrider.speculation.grammar import Grammars, Guide, Masks

log = structlog.get_logger(__name__)


class GrammarCursor:
    """One session's way through its grammar, in step with what is committed. For the drafter's thread."""

    def __init__(self, guide: Guide, position: int) -> None:
        self._guide: Guide | None = guide
        self._position = position  # as far as the guide has come

    def allowed(
        self, tokens: Sequence[int], committed: int, paths: Sequence[Sequence[int]], vocab_size: int
    ) -> Masks | None:
        """Which ids may follow each path from the first `committed` tokens; None: whatever a drafter likes.
        # [paths, vocab]"""
        guide = self._at(tokens, committed)
        if guide is None:
            return None
        try:
            return guide.allowed(paths, vocab_size)
        except InvalidRequest as error:
            self._leave(error)
            return None

    def fitting(self, tokens: Sequence[int], committed: int, path: Sequence[int]) -> int:
        """How many guesses of a path, in a row, are not against the grammar."""
        guide = self._at(tokens, committed)
        return len(path) if guide is None else guide.fitting(path)

    def _at(self, tokens: Sequence[int], committed: int) -> Guide | None:
        new, self._position = tokens[self._position : committed], committed
        if self._guide is not None and new:
            try:
                self._guide.advance(new)
            except InvalidRequest as error:
                self._leave(error)
        return self._guide

    def _leave(self, error: InvalidRequest) -> None:
        log.info("guesses are free from here", error=error.message)
        self._guide = None


class TargetGrammars:
    """For the vocabulary of whatever target a session has, where this drafter finds its tokenizer."""

    def __init__(self, settings: DrafterSettings) -> None:
        self._names = [name for name in (settings.model, settings.target) if name and not name.isdecimal()]
        self._found: dict[tuple[str, tuple[int, ...]], asyncio.Future[Grammars | None]] = {}

    async def rails(
        self, params: SamplingParams, tokens: Sequence[int], prompt_length: int, digest: str, ends: Sequence[int]
    ) -> GrammarCursor | None:
        """For a session that begins with these tokens, at a target with this vocabulary and these end tokens.

        Raises InvalidRequest for a grammar that does not compile.
        """
        if params.grammar is None:
            return None
        here = digest, tuple(ends)
        if here not in self._found:
            self._found = {here: asyncio.ensure_future(asyncio.to_thread(self._find, *here))}
        grammars = await asyncio.shield(self._found[here])
        if grammars is None:
            return None
        return GrammarCursor(await grammars.begin(params, tokens[prompt_length:]), len(tokens))

    def _find(self, digest: str, ends: tuple[int, ...]) -> Grammars | None:
        for tokenizer in self._tokenizers():
            if Vocabulary.of(tokenizer).digest == digest:
                return Grammars(partial(as_json, tokenizer), ends)
        log.warning("the target's tokenizer is not here: with a grammar, guesses are free; name it with --target")
        return None

    def _tokenizers(self) -> Iterator[PreTrainedTokenizerBase]:
        """Those that are at hand: nothing is fetched for this."""
        for name in self._names:
            try:
                place = _place(name)
                yield AutoTokenizer.from_pretrained(str(place), trust_remote_code=False, local_files_only=True)
            except (OSError, ValueError, KeyError, StartupError) as error:
                log.debug("no tokenizer", name=name, error=str(error))


def _place(name: str) -> Path | str:
    if name in (DEFAULT, DEFAULT_NAME):
        return default_path()
    return Path(name).expanduser() if Path(name).expanduser().is_dir() else locate(name, lambda _: None)
