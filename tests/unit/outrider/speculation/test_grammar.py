"""What may follow what: against an enumeration of small languages, and as JSON that anybody can read."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from coordinator.persistence.session_record import SessionRequest
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol import convert
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import GRAMMAR_FORMS, MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from outrider.speculation import sampling
from outrider.speculation.grammar import ONE_TEXT, GrammarCompiler, GrammarMatcher, _constants
from outrider.testing.toy_models import byte_tokenizer

BYTES = byte_tokenizer()
END = 256
VOCAB = 257
LETTERS = "abc"
FEW = byte_tokenizer(letters=LETTERS)
FEW_END = 3
LONGEST = 7
DEEP = 4  # letters that paths go: longer words tell what may follow


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(partial(tokenizer_json, BYTES), [END])


def asked(*, ignore_eos: bool = False, **form: Any) -> SamplingParams:
    return SamplingParams(grammar=Grammar(**form), ignore_eos=ignore_eos)


def spelt(text: str) -> list[int]:
    return list(BYTES.encode(text))


def followers(guide: GrammarMatcher, path: Sequence[int] = ()) -> set[int]:
    return set(guide.allowed([path], VOCAB)[0].nonzero()[0].tolist())


# --- small languages -------------------------------------------------------------------------------------------------

REGEXES = ["ab?c", "a*", "(ab|ac)+", "a(b|c){1,2}", "b|ba|bac*", "(a|b)*c"]


class Language:
    """What a regular expression over a few letters describes, by trying."""

    def __init__(self, regex: str) -> None:
        words = ["".join(letters) for n in range(LONGEST + 1) for letters in product(LETTERS, repeat=n)]
        self.words = {word for word in words if re.fullmatch(regex, word)}

    def letters_after(self, text: str) -> set[str]:
        return {word[len(text)] for word in self.words if word.startswith(text) and len(word) > len(text)}

    def allowed(self, text: str, *, ignore_eos: bool) -> set[int]:
        """Ids, where this is the place of what is committed."""
        letters = {LETTERS.index(letter) for letter in self.letters_after(text)}
        may_end = text in self.words and not (letters and ignore_eos)
        return letters | ({FEW_END} if may_end else set())


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("regex", REGEXES)
def test_what_may_follow_is_what_leads_to_a_word(regex: str, ignore_eos: bool) -> None:
    language = Language(regex)
    grammars = GrammarCompiler(partial(tokenizer_json, FEW), [FEW_END])
    params = asked(regex=regex, ignore_eos=ignore_eos)
    texts = [""]
    paths: list[list[int]] = []
    wanted: list[set[int]] = []
    while texts:
        text = texts.pop()
        ids = [LETTERS.index(letter) for letter in text]
        paths.append(ids)
        ended = bool(ids) and not language.letters_after(text)
        wanted.append(set() if ended else language.allowed(text, ignore_eos=ignore_eos))
        for letter in LETTERS:
            if len(text) < DEEP and letter in language.letters_after(text):
                texts.append(text + letter)
            elif len(text) < DEEP:
                paths.append([*ids, LETTERS.index(letter)])  # against the grammar
                wanted.append(set())
        if text in language.words and ids:
            paths.append([*ids, FEW_END])
            wanted.append(set())
        # Committed instead of guessed.
        guide = grammars.compile(params)
        end = guide.advance(ids)
        assert (end == len(ids)) == ended
        assert set(guide.allowed([[]], 4)[0].nonzero()[0].tolist()) == language.allowed(text, ignore_eos=ignore_eos)
    random.Random(1).shuffle(both := list(zip(paths, wanted, strict=True)))
    masks = grammars.compile(params).allowed([path for path, _ in both], 4)
    assert [set(mask.nonzero()[0].tolist()) for mask in masks] == [follow for _, follow in both]


def test_the_end_is_where_nothing_can_follow(grammars: GrammarCompiler) -> None:
    assert grammars.compile(asked(regex="abc")).advance(spelt("abc")) == 3
    assert grammars.compile(asked(regex="abc")).advance(spelt("abcx")) == 3, "what is drawn behind it does not count"
    assert grammars.compile(asked(regex="ab*")).advance(spelt("abb")) is None
    assert grammars.compile(asked(regex="ab*")).advance([*spelt("abb"), END]) == 4
    for tokens in (spelt("x"), [END], [*spelt("a"), END]):
        with pytest.raises(InvalidRequest, match=r"params\.grammar\.regex failed after"):
            grammars.compile(asked(regex="ab+")).advance(tokens)
    over = grammars.compile(asked(regex="ab"), spelt("ab"))
    with pytest.raises(InvalidRequest, match="the output had ended"):
        over.advance(spelt("b"))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_that_is_text_as_well_follows_only_where_the_output_may_end(ignore_eos: bool) -> None:
    """A line feed, or a mark that the tokenizer takes for text: it ends the output wherever it is drawn."""
    a, b, c = range(3)
    compiler = GrammarCompiler(partial(tokenizer_json, FEW), [FEW_END, b])
    guide = compiler.compile(asked(regex="[abc]{3}", ignore_eos=ignore_eos))
    assert [set(mask.nonzero()[0].tolist()) for mask in guide.allowed([(), (a,), (a, c)], 4)] == [{a, c}] * 3
    may_end = compiler.compile(asked(regex="a[abc]*", ignore_eos=ignore_eos), [a])
    assert followers(may_end) == ({a, c} if ignore_eos else {a, b, c, FEW_END})
    assert followers(compiler.compile(asked(regex="ab", ignore_eos=ignore_eos), [a])) == {b}, "nothing else can follow"
    named = compiler.compile(asked(lark=f"%llguidance {{}}\nstart: /[abc]*/ <[{FEW_END}]>", ignore_eos=ignore_eos), [a])
    assert followers(named) == ({a, c} if ignore_eos else {a, c, FEW_END})


def test_a_session_goes_on_from_what_it_has_said(grammars: GrammarCompiler) -> None:
    """As another verifier takes it over."""
    text = '{"a": [1, 22'
    for said in range(len(text) + 1):
        guide = grammars.compile(asked(json_object=True), spelt(text[:said]))
        guide.advance(spelt(text[said:]))
        assert followers(guide) == followers(grammars.compile(asked(json_object=True), spelt(text)))
    with pytest.raises(InvalidRequest, match="failed after 1 tokens"):
        grammars.compile(asked(json_object=True), spelt("{x"))
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(asked(json_object=True), spelt("{}{}"))
    assert caught.value.field == "open.tokens"
    over = grammars.compile(asked(json_object=True), spelt("{}"))
    assert followers(over) == {END}, "somebody has missed the end: it can be drawn yet"


def test_looking_around_changes_nothing(grammars: GrammarCompiler) -> None:
    """A mask is a function of the tokens before it: or drafter and verifier, or two verifiers, would go apart."""
    chance = random.Random(5)
    for _ in range(20):
        guide = grammars.compile(asked(json_object=True))
        said: list[int] = []
        while len(said) < 30:
            paths = [[]]
            for _ in range(8):
                path = list(chance.choice(paths))
                follow = followers(guide, path) or {65}
                paths.append([*path, chance.choice([*sorted(follow), chance.randrange(VOCAB)])])
            seen = guide.allowed(paths, VOCAB)
            fresh = grammars.compile(asked(json_object=True), said)
            assert (seen == fresh.allowed(paths, VOCAB)).all()
            token = chance.choice(sorted(followers(guide)))
            said.append(token)
            if guide.advance([token]) is not None:
                break


@pytest.mark.parametrize(
    ("form", "said", "guess", "instead"),
    [
        ({"json_object": True}, '{"b":', "[1", " 1"),
        ({"lark": 'start: "a" X "b" | "c" X "d"\nX: /x+/'}, "", "cx", "ax"),
    ],
)
def test_a_guess_that_fails_leaves_no_mask_behind(
    grammars: GrammarCompiler, form: dict[str, Any], said: str, guess: str, instead: str
) -> None:
    """llguidance remembers its last mask by a place that the guess and the output may have in common."""
    guide = grammars.compile(asked(**form), spelt(said))
    guide.allowed([spelt(guess)[:length] for length in range(len(guess) + 1)], VOCAB)
    guide.advance(spelt(instead))
    assert followers(guide) == followers(grammars.compile(asked(**form), spelt(said + instead)))


def test_masks_are_as_wide_as_the_logits(grammars: GrammarCompiler) -> None:
    guide = grammars.compile(asked(regex="[a-z]"))
    masks = {width: guide.allowed([[]], width)[0] for width in (40, VOCAB, 300)}
    assert masks[300][:VOCAB].tolist() == masks[VOCAB].tolist()
    assert not masks[300][VOCAB:].any(), "no letter has these ids"
    assert masks[40].tolist() == masks[VOCAB][:40].tolist()


def test_guesses_are_admitted_as_far_as_they_fit(grammars: GrammarCompiler) -> None:
    guide = grammars.compile(asked(regex="abc*"), spelt("a"))
    assert [guide.count_allowed(spelt(text)) for text in ("", "bcc", "bcb", "c", "bccccccccca")] == [0, 3, 2, 0, 10]
    assert guide.count_allowed([*spelt("b"), END]) == 2
    assert followers(guide) == set(spelt("b")), "asking moves nothing"


def test_guesses_that_use_up_the_grammars_limits_do_not_end_the_session(grammars: GrammarCompiler) -> None:
    """Nor that of others with the same grammar: all share what has been found out, and what that took."""
    a, b = spelt("ab")
    params = asked(regex="(b|((((a{100}){100}){100}){100}))*")
    guide, other = grammars.compile(params, [b]), grammars.compile(params, [b])
    masks = guide.allowed([[], [a], [a] * 20, [b], [b, *[a] * 20], [b, b]], VOCAB)
    seen = [set(mask.nonzero()[0].tolist()) for mask in masks]
    assert seen == [{a, b, END}, {a}, {a}, {a, b, END}, {a}, {a, b, END}]
    follow(guide, [b, b])
    follow(other, [b, b])
    follow(grammars.compile(params), [b, b])
    assert guide.affordable_masks(0.02) < 20, "it costs: there are to be fewer guesses"


def test_a_matcher_takes_its_masks_for_slow_until_it_has_measured_them(grammars: GrammarCompiler) -> None:
    guide = grammars.compile(asked(regex="(ab)*"))
    assert 1 <= guide.affordable_masks(0.02) <= 10
    for _ in range(300):
        guide.allowed([[]], VOCAB)
    assert guide.affordable_masks(0.02) > 20


def test_the_way_to_a_mask_counts_in_its_time(grammars: GrammarCompiler) -> None:
    """Each branch of a tree copies a matcher, and with it all that a long output has left there."""
    said = spelt('{"a": [' + ",".join(map(str, range(4000))))
    guide, branches = grammars.compile(asked(json_object=True), said), [[it] for it in spelt("0123456789.,")]
    guide.allowed([[]], VOCAB)
    guide._mask_s = 0.0
    started = time.thread_time()
    guide.allowed(branches, VOCAB)
    assert guide.affordable_masks(time.thread_time() - started) <= 3 * len(branches)


def follow(guide: GrammarMatcher, tokens: Sequence[int]) -> None:
    for token in tokens:
        guide.advance([token])
        guide.allowed([[]], VOCAB)


# --- JSON ------------------------------------------------------------------------------------------------------------

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["circle", "square"]},
            "at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tag"}]},
        },
        "required": ["kind", "at", "next"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "object", "properties": {"id": {"const": 7}}, "required": ["id"]}},
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "list": {"type": "array", "items": {"type": "string", "enum": ["x", "yy", "zzz"]}, "minItems": 1, "maxItems": 4},
    "map": {"type": "object", "properties": {"n": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
}


# The letters that stand for bytes, in GPT-2's order: those that can be shown for themselves, the others after them.
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTER_OF = {byte: chr(byte) for byte in _SHOWN}
_LETTER_OF |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _SHOWN)}
BYTE_OF = {BYTES.convert_tokens_to_ids(letter): byte for byte, letter in _LETTER_OF.items()}


def wander(guide: GrammarMatcher, chance: random.Random, most: int) -> tuple[bytes, bool]:
    """Any way through a grammar, token by token; whether the end was reached."""
    said = b""
    for _ in range(most):
        # Quotes and closing brackets more often than by chance, or nothing would ever end.
        follow = sorted(followers(guide))
        ends = [token for token in follow if token == END or BYTE_OF[token] in b'"]},:']
        token = chance.choice(ends if ends and chance.random() < 0.6 else follow)
        done = guide.advance([token]) is not None
        if token != END:
            said += bytes([BYTE_OF[token]])
        if done:
            return said, True
    return said, False


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_way_through_a_schema_is_json_that_it_describes(grammars: GrammarCompiler, name: str) -> None:
    ended = 0
    for seed in range(40):
        guide = grammars.compile(asked(json_schema=json.dumps(SCHEMAS[name])))
        said, whole = wander(guide, random.Random(seed), 200)
        if whole:
            ended += 1
            jsonschema.validate(json.loads(said), SCHEMAS[name])
    assert ended > 20


def test_a_json_object_is_any_json_object_and_nothing_else(grammars: GrammarCompiler) -> None:
    ended = 0
    for seed in range(60):
        said, whole = wander(grammars.compile(asked(json_object=True)), random.Random(seed), 120)
        assert said.startswith(b"{")
        if whole:
            ended += 1
            assert isinstance(json.loads(said), dict)
    assert ended > 20


def test_whitespace_is_sensible(grammars: GrammarCompiler) -> None:
    value = {"a": [1, {"b": None, "c": "x y"}], "d": {}}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert grammars.compile(asked(json_object=True)).advance(spelt(text)) == len(text)
    for sensible, further in (
        ("", " "),
        ("{ ", " "),
        ("{\n", "\n"),
        ("{\n" + " " * 32, " "),
        ('{"a":', "\t"),
        ("{}", "\n"),
    ):
        guide = grammars.compile(asked(json_object=True))
        assert guide.count_allowed(spelt(sensible + further)) == len(sensible)


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "regex": ("regex", "a(b", "unclosed group"),
    "lark": ("lark", "start: nowhere", "unknown name"),
    "keyword": ("json_schema", '{"type": "object", "not": {"type": "string"}}', "Unimplemented keys"),
    "type": ("json_schema", '{"type": "text"}', "Invalid type"),
    "elsewhere": ("json_schema", '{"$ref": "http://localhost/x.json"}', "is not present in a registry"),
    "never": ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "Unsatisfiable"),
    "for ever": ("json_schema", '{"$ref": "#"}', "no token can follow"),
    "optional without end": ("lark", "start: (" + "|".join(f"A{i}?" for i in range(3000)) + ")*", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compile_is_refused_with_the_reason(grammars: GrammarCompiler, name: str) -> None:
    form, text, reason = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(asked(**{form: text}))
    assert caught.value.field == f"params.grammar.{form}"
    assert reason in caught.value.message
    assert len(caught.value.message) < 250
    assert grammars.compile(asked(regex="a")), "the next one is none the worse"


CHAINS = {
    "rules": "Grammar(lark='start:a0\\n' + '\\n'.join(f'a{i}:a{i+1}' for i in range(5600)) + '\\na5600:\"x\"')",
    "terminals": "Grammar(lark='start:A0\\n' + '\\n'.join(f'A{i}:A{i+1}' for i in range(5600)) + '\\nA5600:\"x\"')",
    "unknown": "Grammar(lark='start:a0\\n' + '\\n'.join(f'a{i}:a{i+1}' for i in range(5600)))",
    "arrays": "Grammar(json_schema=json.dumps(nested(44)))",
}
CHILD = """
import json, sys, time
from outrider.protocol.errors import InvalidRequest
from outrider.speculation.grammar import GrammarCompiler
from outrider.protocol.sampling_params import Grammar, SamplingParams

def nested(n):
    def inside(x):
        for _ in range(50):
            x = {"type": "array", "items": x}
        return x
    links = {f"a{i}": inside({"$ref": f"#/$defs/a{i+1}"}) for i in range(n)}
    return {"$defs": {**links, f"a{n}": {"type": "null"}}, "$ref": "#/$defs/a0"}

grammar = %s
grammar.check()
tokenizer = sys.stdin.read()
grammars = GrammarCompiler(lambda: tokenizer, [256])
began = time.process_time()
try:
    guide = grammars.compile(SamplingParams(grammar=grammar))
    guide.allowed([[]], 257)
    print("compiled")
except InvalidRequest as error:
    print("refused", error.message)
assert time.process_time() - began < 5, "it would keep everybody waiting"
"""


@pytest.mark.parametrize("chain", CHAINS)
def test_long_chains_end_no_process(chain: str) -> None:
    """The compiler calls itself for each link. In a process of its own: this was a segmentation fault."""
    command = [sys.executable, "-c", CHILD % CHAINS[chain]]
    done = subprocess.run(command, input=tokenizer_json(BYTES), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused" if chain == "unknown" else "compiled")


LOWEST = [
    '{"const": -9223372036854775808}',
    '{"type": "integer", "minimum":-1e30,"maximum":-1E+25}',
    '{"enum":[-9223372036854775807]}',
    r'{"enum": ["\\", -9223372036854775808, "\""]}',
    '{"type":"integer","minimum":-9223372036854775e3,"maximum":-9223372036854775e3}',
    '{"type":"integer","minimum":-9223372036854775295.99,"maximum":-9223372036854775295.99}',
]


@pytest.mark.parametrize("schema", LOWEST)
@pytest.mark.parametrize("form", ["json_schema={!r}", "lark='start: %json ' + {!r}"])
def test_the_lowest_numbers_end_no_process(schema: str, form: str) -> None:
    """A request of 31 bytes ended the coordinator."""
    command = [sys.executable, "-c", CHILD % f"Grammar({form.format(schema)})"]
    done = subprocess.run(command, input=tokenizer_json(BYTES), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused")
    assert "numbers must be above -9.2e+18" in done.stdout


HIDDEN = r'{"grammars": [{"lark_grammar": "start: %json {\"enum\": [\u002d9223372036854775808]}"}]}'


@pytest.mark.parametrize(
    "asked_for",
    [
        f"lark={HIDDEN!r}",
        "regex='.*' * 32_000",
        "regex=' ?' * 9_000",
        "json_schema='{\"x-guidance\": {\"item_separator\": \"' + 'a?' * 9_000 + '\"}}'",
        "json_schema='{\"pattern\": \"' + 'a?' * 9_000 + '\"}'",
        "json_schema='{\"\\\\u0070attern\": \"' + 'a?' * 9_000 + '\"}'",
        "json_schema='{\"patternProperties\": {\"' + 'a?' * 9_000 + '\": {}}}'",
        "json_schema='{\"x-guidance\": {\"whitespace_pattern\": \"' + 'a?' * 9_000 + '\"}}'",
    ],
)
def test_no_other_form_ends_the_process_or_takes_minutes(asked_for: str) -> None:
    command = [sys.executable, "-c", CHILD % f"Grammar({asked_for})"]
    began = time.monotonic()
    done = subprocess.run(command, input=tokenizer_json(BYTES), capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("refused"), done.stderr[-2000:]
    assert time.monotonic() - began < 30.0


def test_questions_are_no_repetitions(grammars: GrammarCompiler) -> None:
    questions = {"enum": [f"is it {number}?" for number in range(2500)], "description": "a* or b+? " * 1000}
    assert followers(grammars.compile(asked(json_schema=json.dumps(questions))))


def test_numbers_in_texts_and_higher_ones_are_taken(grammars: GrammarCompiler) -> None:
    texts = ["ab-10000000000000000000", "1", 'a "quoted", -99999999999999999999', "\\", ", -1e30"]
    noted = {"type": "number", "description": "kelvin; below all: -1e30"}
    for schema in ({"enum": texts}, noted, {"const": -9e18}, {"maximum": 1e30, "type": "integer"}):
        assert followers(grammars.compile(asked(json_schema=json.dumps(schema))))
    assert followers(grammars.compile(asked(regex="(at: -10000000000000000000)?")))


ROUNDED = [
    '{"const": 9007199254740993}',
    '{"type":"integer","enum":[1,-9007199254740993]}',
    '{"const": 1' + "0" * 400 + "}",
    r'{"properties": {"\"": {"enum" : ["1", "a, \"b\"", 123456789012345678]}}}',
    '{"properties": {"enum": {"const": 1180591620717411303424, "title": "2**70"}}}',
    '{"const": {"a": {"properties": 9007199254740993}}}',
    '{"enum": ["the first", [{"b": "c"}, 18446744073709551617]]}',
    '{"$defs": {"const": {"items": {"enum": [{"a": -9007199254740993}]}}}, "$ref": "#/$defs/const"}',
]


@pytest.mark.parametrize("schema", ROUNDED)
def test_no_number_is_asked_for_that_would_be_written_as_another_one(grammars: GrammarCompiler, schema: str) -> None:
    for form in ({"json_schema": schema}, {"lark": f'start: "a {{" TEXT other\nother: %json{schema}\nTEXT: /[^"]*/'}):
        with pytest.raises(InvalidRequest, match="written rounded to a double"):
            grammars.compile(asked(**form))


def test_constants_are_found_at_any_depth_at_once() -> None:
    """Each integer climbed through all levels: 64 kB took 0.8 s, in which all other sessions waited."""
    deep: Any = list(range(30_000))
    for _ in range(5_000):
        deep = [deep]
    began = time.process_time()
    assert sorted(_constants({"const": deep})) == list(range(30_000))
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("grammar", ['start: "%json {" /[a-z]+/', '# as %json {"type": ...}\nstart: "a"'])
def test_what_looks_like_a_schema_in_lark_may_be_none(grammars: GrammarCompiler, grammar: str) -> None:
    assert followers(grammars.compile(asked(lark=grammar)))


def test_numbers_that_are_written_as_they_are_given_are_taken(grammars: GrammarCompiler) -> None:
    ids = [9007199254740991, 9007199254740994, 1152921504606846976, "9007199254740993", 1.2345678901234567]
    bounds = {"type": "integer", "maximum": 9223372036854775807}
    schema = {"properties": {"id": {"enum": ids, "maximum": 18446744073709551615}, "const": bounds}}
    assert followers(grammars.compile(asked(json_schema=json.dumps(schema))))
    for number in ids:
        guide = grammars.compile(asked(json_schema=json.dumps({"enum": ids})))
        assert guide.count_allowed(spelt(json.dumps(number))) == len(json.dumps(number))


def test_a_grammar_that_takes_too_much_fails_in_bounded_time(grammars: GrammarCompiler) -> None:
    params = asked(regex="((((a{100}){100}){100}){100})")
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=r"params\.grammar\.regex (failed after|does not compile)"):
        follow(grammars.compile(params), spelt("a") * 100)
    assert time.process_time() - began < 5


def test_who_has_no_end_token_or_no_known_bytes_has_no_grammars() -> None:
    for grammars, reason in (
        (GrammarCompiler(partial(tokenizer_json, BYTES), []), "no end token"),
        (GrammarCompiler(lambda: "{}", [1]), "are unknown"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            grammars.compile(asked(regex="a"))


async def test_the_event_loop_goes_on_meanwhile(grammars: GrammarCompiler) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    beating = asyncio.create_task(beat())
    before = beats
    await grammars.compile_async(asked(regex="(a{200}b{200}){200}"))
    assert beats > before
    beating.cancel()


# --- on the way ------------------------------------------------------------------------------------------------------

FORMS = [Grammar(json_schema='{"type": "object"}'), Grammar(json_object=True), Grammar(regex="a|b"), Grammar(lark="x")]


@pytest.mark.parametrize("grammar", FORMS, ids=lambda grammar: grammar.field)
def test_every_form_survives_the_wire_and_the_record(grammar: Grammar) -> None:
    params = SamplingParams(grammar=grammar, seed=1)
    params.check()
    assert convert.params_from_proto(convert.params_to_proto(params)).grammar == grammar
    request = SessionRequest((1, 2), params)
    assert SessionRequest.from_json(request.to_json()).params.grammar == grammar
    assert [form for form in GRAMMAR_FORMS if getattr(grammar, form)] == [grammar.field.removeprefix("params.grammar.")]


def test_a_record_of_before_there_were_grammars_is_read() -> None:
    old = json.loads(SessionRequest((1, 2), SamplingParams(seed=1)).to_json())
    del old["params"]["grammar"]
    assert SessionRequest.from_json(json.dumps(old)).params == SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("grammar", "field", "value"),
    [
        (Grammar(), "params.grammar", "empty"),
        (Grammar(regex="a", lark="b"), "params.grammar", "regex and lark"),
        (Grammar(regex="é" * (MAX_GRAMMAR_BYTES // 2) + "x"), "params.grammar.regex", f"{MAX_GRAMMAR_BYTES + 1} bytes"),
        (Grammar(json_schema="{"), "params.grammar.json_schema", "{"),
        (Grammar(json_schema="[" * 50_000), "params.grammar.json_schema", "[["),
        (Grammar(json_schema="true"), "params.grammar.json_schema", "true"),
    ],
    ids=["none", "two", "large", "no JSON", "deep", "no object"],
)
def test_what_can_be_no_grammar_is_refused_by_name(grammar: Grammar, field: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(grammar=grammar).check()
    assert caught.value.field == field
    assert value in caught.value.value


def test_only_what_is_allowed_can_be_drawn() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    allowed = np.array([[True, True, False], [False, False, False]])
    kept = sampling.restrict(logits, allowed)
    assert kept.tolist() == [[1.0, 2.0, -torch.inf], [1.0, 2.0, 3.0]], "a row that nobody draws from stays finite"
    probs = sampling.candidates(kept, SamplingParams(top_p=0.9)).dense(3)
    assert probs[0, 2] == 0.0
    assert probs[0].sum().item() == pytest.approx(1.0)


def test_grammars_of_one_text_leave_those_of_users_compiled() -> None:
    """A request for the log probabilities of prompts has one for each of them, which is used once."""
    compiler = GrammarCompiler(partial(tokenizer_json, BYTES), [END])
    users = Grammar(regex="ab?c")
    compiler.compile(SamplingParams(grammar=users))
    kept = compiler._known[0][users]
    for token in range(20):
        guide = compiler.compile(asked(lark=f"{ONE_TEXT}{token}]> <[98]>"))
        assert followers(guide) == {token}
    compiler.compile(SamplingParams(grammar=users))
    assert compiler._known[0][users] is kept
    assert len(compiler._known[1]) == 16


@pytest.mark.parametrize("by_id", [False, True])
def test_a_letter_and_the_byte_that_spells_it_are_two_tokens(by_id: bool) -> None:
    """As in vocabularies that spell unknown letters in bytes: `echo` repeats a prompt by ids."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    compiler = GrammarCompiler(partial(tokenizer_json, tokenizer), [vocabulary["</s>"]])
    text = [vocabulary[piece] for piece in "a▁b!"]
    form = {"lark": ONE_TEXT + "]> <[".join(map(str, text)) + "]>"} if by_id else {"regex": "[a-z ]+!"}
    guide = compiler.compile(asked(**form))
    for token in text:
        allowed = guide.allowed([()], len(vocabulary))[0]
        assert allowed[token]
        assert not by_id or allowed.sum() == 1
        ended = guide.advance([token])
    assert ended == 1


@pytest.mark.parametrize("text", ["The quick brown fox jumps over it.", "hello world 112233", "x" * 50, "aabab" * 9])
def test_guesses_change_no_mask_of_a_text_that_is_given_by_ids(grammars: GrammarCompiler, text: str) -> None:
    """As `echo` with log probabilities gives it."""
    ids, chance = spelt(text), random.Random(5)
    given = asked(lark=ONE_TEXT + "]> <[".join(map(str, ids)) + "]>", ignore_eos=True)
    guide, done = grammars.compile(given), 0
    while done < len(ids):
        ahead = ids[done : done + chance.randrange(1, 9)]
        paths = [tuple(ahead[:length]) for length in range(len(ahead) + 1)] + [(*ahead[:2], END), (ids[done], 7)]
        found = guide.allowed(paths, VOCAB)
        fresh = grammars.compile(given, ids[:done])
        for path, mask in zip(paths, found, strict=True):
            assert np.array_equal(mask, fresh.allowed([path], VOCAB)[0]), (done, path)
            if list(path) == ids[done : done + len(path)] != ids[done:]:
                assert mask.nonzero()[0].tolist() == [ids[done + len(path)]]
        count = chance.randrange(1, len(ahead) + 1)
        ended = guide.advance(ahead[:count])
        done += count
    assert ended == count


@pytest.mark.parametrize("mark", ["<|end|>", "<|sep|>"])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("form", ["json_schema", "regex", "lark"])
def test_text_that_spells_a_special_token_is_written_in_letters(form: str, ignore_eos: bool, mark: str) -> None:
    """Forced text, for which llguidance itself allows the special token, and then refuses it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|sep|>"]})
    compiler = GrammarCompiler(partial(tokenizer_json, tokenizer), [END])
    text = f'"q{mark}x"'
    grammar = {"json_schema": f'{{"const": "q{mark}x"}}', "regex": re.escape(text), "lark": f'start: "\\"q{mark}x\\""'}
    guide = compiler.compile(asked(ignore_eos=ignore_eos, **{form: grammar[form]}))
    letters = spelt(text[:3]) + [token for letter in text[3:] for token in spelt(letter)]  # none of them special
    for at, token in enumerate(letters):
        ahead = guide.allowed([letters[at:upto] for upto in range(at, len(letters))], VOCAB + 1)
        assert [row.nonzero()[0].tolist() for row in ahead] == [[each] for each in letters[at:]]
        ended = guide.advance([token])
    assert ended == 1
