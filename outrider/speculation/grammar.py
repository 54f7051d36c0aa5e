"""What an output must be: grammars compiled for a vocabulary, and a session's place in one.

The parsing is llguidance's; here is what the services need of it. A verifier
masks what its target may draw, a drafter what it guesses, a coordinator
refuses what does not compile. No torch: masks are numpy's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.protocol.errors import InvalidRequest, shorten
from outrider.protocol.sampling_params import Grammar, SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
Masks = npt.NDArray[np.bool_]

# What one grammar may take. The first mask, made when it is compiled, stays below half a second and some hundred
# megabytes, a later one below some ten milliseconds. A grammar that needs more is refused, or fails on the way.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)
_REMEMBERED = 16  # compiled grammars
_FADES = 0.97
_STACK_BYTES = 512 * 1024 * 1024
_stack = threading.Lock()
_INSIDES = re.compile("<state>|<non-verbose/>")

# Between the parts of a JSON text: nothing, a blank, or a new line with its indentation.
_WHITESPACE: JsonCompileOptions = {"whitespace_pattern": r"[ ]|\n[ ]{0,32}"}
_ANY_OBJECT = '{"type": "object"}'


class GrammarMatcher:
    """One session's place in its grammar, after what is committed. Used by one thread at a time.

    A mask depends on the tokens before it alone, not on what was looked at
    meanwhile: so everybody who goes the same way sees the same.
    """

    def __init__(self, grammar: Grammar, start: Callable[[], LLMatcher], ends: Sequence[int], ignore_eos: bool) -> None:
        self._grammar = grammar
        self._start = start
        self._matcher = start()
        self._ends = list(ends)
        self._ignore_eos = ignore_eos
        self._said: list[int] = []  # what is committed
        self._ahead: list[int] = []  # guesses behind that, to the matcher's place
        self._over = False
        self._mask_s = 0.0  # what a mask takes: the longest of late

    def advance(self, tokens: Sequence[int]) -> int | None:
        """These are committed. After how many of them the output is complete; None: it goes on.

        Raises InvalidRequest when they do not fit.
        """
        for count, token in enumerate(tokens, start=1):
            if token in self._ends and self._matcher.is_accepting():
                self._over = True
                return count
            if self._over:
                raise self._failed("the output had ended")
            self._take(token)
            self._said.append(token)
            if self._matcher.is_stopped():  # nothing can follow
                self._over = True
                return count
        return None

    def allowed(self, paths: Sequence[Sequence[int]], vocab_size: int) -> Masks:
        """Which ids may follow each path of guesses from what is committed. None, where the path itself is against the
        grammar, or where the output has ended before.  # [paths, vocab]

        Raises InvalidRequest when the grammar has come to its limits.
        """
        rows = np.zeros((len(paths), vocab_size), dtype=np.bool_)
        dead: tuple[int, ...] | None = None
        for path, row in sorted((tuple(path), row) for row, path in enumerate(paths)):  # what hangs together together
            if dead is not None and path[: len(dead)] == dead:
                continue
            mask = self._look(path)
            if mask is None:
                dead = path
            else:
                known = min(len(mask), vocab_size)
                rows[row, :known] = mask[:known]
        self._go(())
        return rows

    def count_allowed(self, path: Sequence[int]) -> int:
        """How many of these guesses, in a row from what is committed, the grammar lets through."""
        return self._matcher.validate_tokens(list(path))

    def affordable_masks(self, seconds: float) -> int:
        """How many masks can be had in this time, from experience."""
        return int(min(seconds / max(self._mask_s, 1e-6), 1e6))

    # All matchers of a grammar share what they have found out, and its limits: what one has used up by looking at a
    # guess the others lack. So whatever fails is tried once more with a new matcher, and only the tokens decide.

    def _take(self, token: int) -> None:
        if self._matcher.consume_token(token):
            return
        self._begin_again()
        if not self._matcher.consume_token(token):
            raise self._failed(self._matcher.get_error())

    def _look(self, path: tuple[int, ...]) -> Masks | None:
        """Which ids may follow a path of guesses; None: nothing, there is no such place, or it is too much for the
        grammar.  # [ids of the tokenizer]"""
        if not set(self._ends).isdisjoint(path):
            return None
        said = ""
        for _ in range(2):
            if self._go(path):
                if path and self._matcher.is_stopped():
                    return None
                mask = self._mask()
                if not self._matcher.is_error():
                    return mask
            said = self._matcher.get_error()
            self._begin_again()
        if not path:
            raise self._failed(said)
        return None

    def _go(self, path: tuple[int, ...]) -> bool:
        """Move to the end of a path; False: that could not be done."""
        shorter = min(len(self._ahead), len(path))
        same = next((i for i in range(shorter) if self._ahead[i] != path[i]), shorter)
        if same < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - same)
            del self._ahead[same:]
        new = list(path[same:])
        if self._matcher.validate_tokens(new) < len(new):
            return False
        self._ahead += new
        return self._matcher.consume_tokens(new)

    def _mask(self) -> Masks:
        started = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._mask_s = max(time.thread_time() - started, self._mask_s * _FADES)
        mask = np.unpackbits(bits, bitorder="little").view(np.bool_)
        if self._ignore_eos:
            further = mask.copy()
            further[self._ends] = False
            return further if further.any() else mask
        return mask

    def _begin_again(self) -> None:
        started = time.perf_counter()
        self._matcher, self._ahead = self._start(), []
        self._matcher.consume_tokens(self._said)
        self._mask_s = max(self._mask_s, time.perf_counter() - started)

    def _failed(self, said: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self._grammar.field} failed after {len(self._said)} tokens: {_plain(said)}",
            field=self._grammar.field,
            value=self._grammar.text,
        )


class GrammarCompiler:
    """Those of one vocabulary: `tokenizer` gives the text of its tokenizer.json when the first grammar is asked for."""

    def __init__(self, tokenizer: Callable[[], str], ends: Sequence[int]) -> None:
        self._read_tokenizer = tokenizer
        self._ends = tuple(ends)
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # one at a time: many large grammars take one core
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        # The library notes the stack with each of its errors where RUST_BACKTRACE is set, which takes it minutes for
        # one that is found deep down.
        os.environ.setdefault("RUST_LIB_BACKTRACE", "0")

    def compile(self, params: SamplingParams, output: Sequence[int] = ()) -> GrammarMatcher:
        """For a session that has said `output`. Takes a while, most of it outside Python.

        Raises InvalidRequest for a grammar that does not compile, and for an output that does not fit.
        """
        grammar = params.grammar
        assert grammar is not None
        guide = GrammarMatcher(grammar, partial(self._start, grammar), self._ends, params.ignore_eos)
        end = guide.advance(output)
        if end is not None and end < len(output):
            raise InvalidRequest.of("open.tokens", f"{len(output)} output tokens", f"{end}: {grammar.field} ends there")
        return guide

    async def compile_async(self, params: SamplingParams, output: Sequence[int] = ()) -> GrammarMatcher:
        """The same while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.compile, params, output)

    def _start(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            matcher = self._known.pop(grammar, None)
            if matcher is None or not _able(matcher):
                matcher = _on_deep_stack(lambda: self._build(grammar))
            self._known[grammar] = matcher
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return matcher.deep_copy()

    def _build(self, grammar: Grammar) -> LLMatcher:
        self._tokenizer = self._tokenizer or self._load(grammar)
        try:
            matcher = LLMatcher(self._tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise _refused(grammar, str(error)) from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # the dearest one; what it finds out is kept
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher

    def _load(self, grammar: Grammar) -> LLTokenizer:
        if not self._ends:
            raise _refused(grammar, "the target has no end token")
        try:
            definition = json.loads(self._read_tokenizer()) | {"truncation": None, "padding": None}
            return LLTokenizer(json.dumps(definition), eos_token=list(self._ends))
        except (OSError, ValueError) as error:
            raise _refused(grammar, f"nothing is known of the bytes of the target's tokens: {error}") from error


def _able(matcher: LLMatcher) -> bool:
    """Whether sessions have left anything of its limits."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return not copy.is_error()


def _definition(grammar: Grammar) -> str:
    if grammar.json_object:
        return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_WHITESPACE)
    if grammar.json_schema:
        return LLMatcher.grammar_from_json_schema(grammar.json_schema, defaults=_WHITESPACE)
    if grammar.regex:
        return LLMatcher.grammar_from_regex(grammar.regex)
    return LLMatcher.grammar_from_lark(grammar.lark)


def _on_deep_stack(work: Callable[[], T]) -> T:
    """In a thread with room: the compiler follows a chain of rules by calling itself, and on an ordinary stack a long
    one would end the process. Only what is used of the stack takes memory."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    with _stack:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar-compiler").start()
        finally:
            threading.stack_size(usual)
    return result.result()


def _refused(grammar: Grammar, said: str) -> InvalidRequest:
    said = _plain(said)
    return InvalidRequest(
        f"{grammar.field} does not compile: {said}", field=grammar.field, value=grammar.text, limit=said
    )


def _plain(said: str) -> str:
    """The library's message on one line, without the state that it adds for its own people."""
    said = " ".join(_INSIDES.split(said)[0].split())
    return "no token can follow" if said.startswith("NoExtension") else shorten(said)
