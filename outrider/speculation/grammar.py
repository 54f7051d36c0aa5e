"""Grammars of outputs: compiled for a vocabulary, and matched against a session's output.

llguidance does the parsing. A verifier masks its target's logits, a drafter filters its guesses, a coordinator rejects
grammars that do not compile. No torch: masks are numpy arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.protocol.errors import InvalidRequest, shorten
from outrider.protocol.sampling_params import Grammar, SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Masks = npt.NDArray[np.bool_]

# Limits of one grammar. The first mask, at compilation, takes at most half a second and about a hundred megabytes; a
# later one takes about ten milliseconds. A grammar that needs more is rejected, or fails during generation.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)
ONE_TEXT = "%llguidance {}\nstart: <["  # start of a grammar that allows one sequence of token ids
_MAX_COMPILED = 16  # grammars in each cache
_MASK_TIME_DECAY = 0.97
_STACK_BYTES = 512 * 1024 * 1024
_stack = threading.Lock()
_INTERNALS = re.compile(r"<state>|<non-verbose/>|\n +\d+ \| ")  # state, and the lines around an error
_NAMED = re.compile(r" // ([\w-]+)\n *\^")  # the comment of the line with the error
# What llguidance does not survive: numbers that it reads as -2**63 overflow its stack; repetitions take minutes.
LOWEST, MAX_REPEATED = -9.2e18, 2_000
_REPEATED, _PATTERN = re.compile(r"[^*+?][*+?]|\{\d"), re.compile(r'(?:pattern|separator)"\s*:\s*("(?:[^"\\]|\\.)*+")')
_NEGATIVE = re.compile(r"(?<=[\s:,[])-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")  # numbers in JSON
_TEXTS, _SCHEMAS = re.compile(r'"(?:[^"\\]|\\.)*"'), re.compile(r"(?:\A|%json)\s*(?=\{\s*[\"}])")
NAMED, CONSTANTS = ("$defs", "definitions", "patternProperties", "properties"), ("const", "enum")  # of JSON schemas

# Whitespace between the parts of a JSON text: none, one space, or a line break with indentation.
WHITESPACE: JsonCompileOptions = {"whitespace_pattern": r"[ ]|\n[ ]{0,32}"}


class GrammarMatcher:
    """The state of one session's output in its grammar, after the committed tokens. Not thread-safe.

    A mask depends only on the tokens before it, not on earlier queries: equal outputs get equal masks on every service.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, ignore_eos: bool) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._matcher = compiler.start(grammar)
        self._ends = list(compiler.ends)
        self._ignore_eos = ignore_eos
        self._committed: list[int] = []
        self._ahead: list[int] = []  # guesses after that, up to the matcher's state
        self._behind: LLMatcher | None = None  # without them: after a rollback, llguidance may give a guess's mask
        self._complete = False
        self._mask_s = 0.002  # time of a mask and the way to it, until measured a slow one: a decaying maximum

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Advance over committed tokens. Return after how many of them the output is complete; None: it continues.

        Raises InvalidRequest for tokens that the grammar does not allow.
        """
        for count, token in enumerate(tokens, start=1):
            if token in self._ends and self._matcher.is_accepting():
                self._complete = True
                return count
            if self._complete:
                raise self._failed("the output had ended")
            if not self._matcher.consume_token(token):
                self._restart()
                if not self._matcher.consume_token(token):
                    raise self._failed(self._matcher.get_error())
            self._committed.append(token)
            if self._matcher.is_stopped():  # nothing can follow
                self._complete = True
                return count
        return None

    def allowed(self, paths: Sequence[Sequence[int]], vocab_size: int) -> Masks:
        """Return which ids may follow each path of guesses after the committed tokens.  # [paths, vocab]

        No id may follow a path that the grammar does not allow, or after the end of the output.
        Raises InvalidRequest when the grammar has reached its limits.
        """
        masks = np.zeros((len(paths), vocab_size), dtype=np.bool_)
        refused: tuple[int, ...] | None = None
        for path, index in sorted((tuple(path), index) for index, path in enumerate(paths)):  # common prefixes together
            if refused is not None and path[: len(refused)] == refused:
                continue
            mask = self._mask_after(path)
            if mask is None:
                refused = path
            else:
                masks[index, : len(mask)] = mask[:vocab_size]
        self._move_to(())
        return masks

    def count_allowed(self, path: Sequence[int]) -> int:
        """Return how many of these guesses, from the first, the grammar allows after the committed tokens."""
        return self._matcher.validate_tokens(list(path))

    def affordable_masks(self, seconds: float) -> int:
        """Return how many masks fit into this time, from measured times."""
        return int(min(seconds / max(self._mask_s, 1e-6), 1e6))

    # All matchers of a grammar share its cached states and its limits, so one session's guesses can use up the limit of
    # another. A failed operation is repeated once with a new matcher: then the result depends on the tokens alone.

    def _mask_after(self, path: tuple[int, ...]) -> Masks | None:
        """Return which ids may follow a path of guesses.  # [ids of the tokenizer]

        None: no id may, the grammar does not allow the path, or its limits are reached.
        """
        if not set(self._ends).isdisjoint(path):
            return None
        started = time.thread_time()
        for first in (True, False):
            if self._move_to(path):
                if path and self._matcher.is_stopped():
                    return None
                mask = self._mask()
                if not self._matcher.is_error():
                    self._mask_s = max(time.thread_time() - started, self._mask_s * _MASK_TIME_DECAY)
                    return mask
            reason = self._matcher.get_error()
            if first or self._matcher.is_error():
                self._restart()
        if not path:
            raise self._failed(reason)
        return None

    def _move_to(self, path: tuple[int, ...]) -> bool:
        """Move the matcher to the end of a path. Return False if that fails."""
        if self._behind is not None and self._ahead != [*path[: len(self._ahead)]]:
            self._matcher, self._behind, self._ahead = self._behind, None, []
        new = list(path[len(self._ahead) :])
        if self._matcher.validate_tokens(new) < len(new):
            return False
        if new and not self._ahead:
            self._behind = self._matcher.deep_copy()
        self._ahead += new
        return self._matcher.consume_tokens(new)

    def _mask(self) -> Masks:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little").view(np.bool_)
        if np.count_nonzero(mask) == 1:
            mask = np.arange(len(mask)) == self._compiler.spell(int(mask.argmax()), self._matcher)
        if not self._ignore_eos and (not self._compiler.written_ends or self._matcher.is_accepting()):
            return mask
        further = mask.copy()
        further[self._ends if self._ignore_eos else self._compiler.written_ends] = False
        return further if further.any() else mask

    def _restart(self) -> None:
        started = time.perf_counter()
        self._matcher, self._behind, self._ahead = self._compiler.start(self._grammar), None, []
        self._matcher.consume_tokens(self._committed)
        self._mask_s = max(self._mask_s, time.perf_counter() - started)

    def _failed(self, reason: str) -> InvalidRequest:
        message = f"{self._grammar.field} failed after {len(self._committed)} tokens: {_plain(reason)}"
        return InvalidRequest(message, field=self._grammar.field, value=self._grammar.text)


class GrammarCompiler:
    """The compiled grammars of one vocabulary. `tokenizer` returns the text of tokenizer.json when first needed.

    A `trial` raises InvalidRequest for a grammar that is too dangerous to compile.
    """

    def __init__(
        self, tokenizer: Callable[[], str], ends: Sequence[int], trial: Callable[[Grammar], None] | None = None
    ) -> None:
        self._read_tokenizer = tokenizer
        self._trial = trial
        self.ends = tuple(ends)
        self.written_ends: list[int] = []  # those that are text as well, as a line feed is; a grammar may name others
        self._tokenizer: LLTokenizer | None = None
        self._known = (dict[Grammar, LLMatcher](), dict[Grammar, LLMatcher]())  # those of one text apart
        self._lock = threading.Lock()  # one compilation at a time: many large grammars use one core
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        # With RUST_BACKTRACE the library records the stack with each error, which takes minutes for a deep one.
        os.environ.setdefault("RUST_LIB_BACKTRACE", "0")

    def compile(self, params: SamplingParams, output: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher that has advanced over `output`. Slow; most of the time is spent outside Python.

        Raises InvalidRequest for a grammar that does not compile, and for an output that it does not allow.
        """
        grammar = params.grammar
        assert grammar is not None
        matcher = GrammarMatcher(self, grammar, params.ignore_eos)
        if (end := matcher.advance(output)) not in (None, len(output)):
            raise InvalidRequest.of("open.tokens", f"{len(output)} output tokens", f"{end}: {grammar.field} ends there")
        return matcher

    async def compile_async(self, params: SamplingParams, output: Sequence[int] = ()) -> GrammarMatcher:
        """Return the same without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.compile, params, output)

    def start(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher of its own at the beginning of the grammar."""
        known = self._known[grammar.lark.startswith(ONE_TEXT)]
        if self._trial and grammar not in known:
            self._tokenizer = self._tokenizer or self._load(grammar)  # its errors are not the trial's
            self._trial(grammar)
        with self._lock:
            matcher = known.pop(grammar, None)
            if matcher is None or not _has_limits_left(matcher):
                matcher = _on_deep_stack(lambda: self._build(grammar))
            known[grammar] = matcher
            if len(known) > _MAX_COMPILED:
                del known[next(iter(known))]
            return matcher.deep_copy()

    def spell(self, token: int, matcher: LLMatcher) -> int:
        """Return the token of a mask that allows no other. Where text spells a special token, llguidance names that."""
        assert self._tokenizer is not None
        forced = matcher.compute_ff_bytes() if self._tokenizer.is_special_token(token) else b""
        if forced[:1] in (b"", b"\xff"):  # not by text: the end, or a token that the grammar names
            return token
        return self._tokenizer.greedy_tokenize(forced.decode(errors="ignore"))[0]

    def _build(self, grammar: Grammar) -> LLMatcher:
        self._tokenizer = self._tokenizer or self._load(grammar)
        try:
            matcher = LLMatcher(self._tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        except (ValueError, RecursionError) as error:
            raise _rejected(grammar, str(error)) from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # the slowest one; its states are cached
        if matcher.is_error():
            raise _rejected(grammar, matcher.get_error())
        return matcher

    def _load(self, grammar: Grammar) -> LLTokenizer:
        if not self.ends:
            raise _rejected(grammar, "the target has no end token")
        try:
            definition = json.loads(self._read_tokenizer()) | {"truncation": None, "padding": None}
            twins = _twins(definition.get("model", {}).get("vocab") or ())
            definition["added_tokens"] = [*definition.get("added_tokens", ()), *twins]
            made = LLTokenizer(json.dumps(definition), eos_token=list(self.ends))
            self.written_ends = [end for end in self.ends if not made.is_special_token(end)]
            return made
        except (OSError, ValueError) as error:
            raise _rejected(grammar, f"the bytes of the target's tokens are unknown: {error}") from error


def _twins(vocabulary: Any) -> list[dict[str, Any]]:
    """Return tokens of one byte that is a token as text too, as special ones: llguidance confuses the two."""
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece: at for at, (piece, _) in enumerate(vocabulary)}
    texts = {piece.replace("▁", " ") for piece in pieces}
    names = [name for byte in range(128) if chr(byte) in texts and (name := f"<0x{byte:02X}>") in pieces]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": pieces[name], "content": name, "special": True, **plain} for name in names]


def _has_limits_left(matcher: LLMatcher) -> bool:
    """Return whether sessions have left a part of the grammar's limits."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return not copy.is_error()


def _definition(grammar: Grammar) -> str:
    patterns_are_named = grammar.json_schema and "patternProperties" not in grammar.text and "\\u" not in grammar.text
    repeating = " ".join(_PATTERN.findall(grammar.text)) if patterns_are_named else grammar.text
    # The time to compile, and of later masks, grows with the square of the repetitions.
    if len(_REPEATED.findall(repeating)) > MAX_REPEATED:
        raise ValueError(f"more than {MAX_REPEATED} repetitions")
    if grammar.regex:
        return LLMatcher.grammar_from_regex(grammar.regex)
    unquoted = _TEXTS.sub("", grammar.text) if grammar.json_schema else grammar.text  # lark hides quotes
    if any(float(number) <= LOWEST for number in _NEGATIVE.findall(unquoted)) or grammar.lark.lstrip()[:1] == "{":
        raise ValueError(f"numbers must be above {LOWEST:g}, and lark no list of grammars in JSON, which may hide one")
    for found in _SCHEMAS.finditer(grammar.text):
        with contextlib.suppress(json.JSONDecodeError):  # a comment or text of lark; of others the compiler tells
            for number in _constants(json.JSONDecoder().raw_decode(grammar.text, found.end())[0]):
                if number > -LOWEST or number != float(number):
                    what = f"what would be written rounded to a double: {number}"
                    raise ValueError(f"const and enum need a string for {what}")
    if grammar.lark:
        return LLMatcher.grammar_from_lark(grammar.lark)
    return LLMatcher.grammar_from_json_schema(grammar.json_schema or '{"type": "object"}', defaults=WHITESPACE)


def _constants(schema: Any) -> Iterator[int]:
    """Yield the integers that a schema has as constants or within them."""
    left = [(schema, False, False)]
    while left:
        part, keys_are_names, inside_constant = left.pop()
        if inside_constant and isinstance(part, int):
            yield part
        if isinstance(part, list):
            left += [(value, False, inside_constant) for value in part]
        elif isinstance(part, dict):
            for key, value in part.items():
                keyword = "" if keys_are_names else key
                left.append((value, keyword in NAMED, inside_constant or keyword in CONSTANTS))


def _on_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """Run `work` in a thread with a large stack. The compiler recurses over chains of rules, and a long one would
    overflow an ordinary stack and end the process. Only the used part of a stack takes memory."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-compiler")
    with _stack:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            result = thread.submit(work)
        finally:
            threading.stack_size(usual)
    thread.shutdown(wait=False)  # it ends after the work
    return result.result()


def _rejected(grammar: Grammar, reason: str) -> InvalidRequest:
    named = _NAMED.search(reason)
    reason, field = (f"{named[1]}: " if named else "") + _plain(reason), grammar.field
    return InvalidRequest(f"{field} does not compile: {reason}", field=field, value=grammar.text, limit=reason)


def _plain(message: str) -> str:
    """Return the library's message on one line, without its internal state."""
    message = " ".join(_INTERNALS.split(message)[0].split())
    return "no token can follow" if message.startswith("NoExtension") else shorten(message)
