"""Grammar state of a session at the drafter.

The verifier enforces the grammar. A guess against it costs only time: a drafter that cannot follow it drafts without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import structlog

from outrider.models.hub import DEFAULT, DEFAULT_NAME, default_path, locate
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.speculation.grammar import GrammarCompiler, GrammarMatcher, Masks

log = structlog.get_logger(__name__)

_MAX_MASKS_S = 0.02  # time for the masks of one draft: other sessions wait for them; guesses beyond are free


class GrammarCursor:
    """State of one session's output in its grammar, at the committed position. Used by the drafter's thread."""

    def __init__(self, matcher: GrammarMatcher, position: int) -> None:
        self._matcher: GrammarMatcher | None = matcher
        self._position = position  # committed tokens that the matcher has consumed

    def allowed(
        self, tokens: Sequence[int], committed: int, paths: Sequence[Sequence[int]], vocab_size: int
    ) -> Masks | None:
        """Return which ids may follow each path from the first `committed` tokens; None: all.  # [paths, vocab]"""
        matcher = self._advance(tokens, committed)
        if matcher is None:
            return None
        try:
            few = paths[: max(1, matcher.affordable_masks(_MAX_MASKS_S))]
            free = np.ones((len(paths) - len(few), vocab_size), dtype=np.bool_)
            return np.concatenate([matcher.allowed(few, vocab_size), free])
        except InvalidRequest as error:
            self._disable(error)
            return None

    def allowed_length(self, tokens: Sequence[int], committed: int, path: Sequence[int]) -> int:
        """Return the length of the longest prefix of `path` that the grammar allows."""
        matcher = self._advance(tokens, committed)
        return len(path) if matcher is None else matcher.count_allowed(path)

    def _advance(self, tokens: Sequence[int], committed: int) -> GrammarMatcher | None:
        new, self._position = tokens[self._position : committed], committed
        if self._matcher is not None and new:
            try:
                self._matcher.advance(new)
            except InvalidRequest as error:
                self._disable(error)
        return self._matcher

    def _disable(self, error: InvalidRequest) -> None:
        log.info("grammar failed, drafting without it", error=error.message)
        self._matcher = None


class TargetGrammars:
    """Compiled grammars for the target's vocabulary, if this drafter has the target's tokenizer."""

    def __init__(self, settings: DrafterSettings) -> None:
        self._names = [name for name in (settings.model, settings.target) if name and not name.isdecimal()]
        self._loaded: dict[tuple[str, tuple[int, ...]], asyncio.Future[GrammarCompiler | None]] = {}

    async def cursor(
        self, params: SamplingParams, tokens: Sequence[int], prompt_length: int, digest: str, eos_ids: Sequence[int]
    ) -> GrammarCursor | None:
        """Return the cursor after `tokens`; None if the target's tokenizer is not available here.

        `digest` and `eos_ids` identify the target's vocabulary. Raise InvalidRequest if the grammar does not compile.
        """
        key = digest, tuple(eos_ids)
        known = self._loaded.get(key)
        if known is None or (known.done() and known.exception()):  # such as where the system allowed no thread
            kept = list(self._loaded.items())[-3:]  # of other targets
            self._loaded = dict(kept) | {key: asyncio.ensure_future(asyncio.to_thread(self._load, *key))}
        grammars = await asyncio.shield(self._loaded[key])
        if grammars is None:
            return None
        return GrammarCursor(await grammars.compile_async(params, tokens[prompt_length:]), len(tokens))

    def _load(self, digest: str, eos_ids: tuple[int, ...]) -> GrammarCompiler | None:
        """Return the grammars of a tokenizer that is available locally; nothing is downloaded."""
        # Here: half a second, for sessions with a grammar alone. Not by `from`, as in outrider.models.tokenizer.
        auto = import_module("transformers").AutoTokenizer
        for name in self._names:
            try:
                tokenizer = auto.from_pretrained(_local_path(name), trust_remote_code=False, local_files_only=True)
                if Vocabulary.of(tokenizer).digest == digest:
                    return GrammarCompiler(partial(tokenizer_json, tokenizer), eos_ids)
            except Exception as error:  # the library may raise anything for files that it cannot read
                log.debug("tokenizer not loaded", name=name, error=str(error))
        log.warning("target's tokenizer not found, drafting without grammars; set --target")
        return None


def _local_path(name: str) -> Path | str:
    if name in (DEFAULT, DEFAULT_NAME):
        return default_path()
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else locate(name, lambda _: None)
