"""Answers as models write them: what is text, what is reasoning, what is a call; whole, in pieces, and broken."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.http.agents.calls.forms import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, Dialect
from coordinator.api.http.agents.parser import AnswerParser, Manner, Part, PartKind

LONG = f"{'s' * 64}__{'g' * 64}"  # of a tool within a namespace
NAMES = ("get_weather", "get_time", "f", LONG)


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def parsed(parser: AnswerParser, pieces: list[str]) -> Answer:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.end()
    answer = Answer()
    for part in parts:
        assert part.text, "no empty parts"
        match part.kind:
            case PartKind.CONTENT:
                answer.content += part.text
            case PartKind.REASONING:
                answer.reasoning += part.text
            case PartKind.CALL:
                answer.calls.append((part.text, ""))
            case PartKind.ARGUMENTS:
                answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + part.text)
    assert parser.calls == len(answer.calls)
    return answer


# Outputs of Qwen2.5 and Hermes, Llama 3.1 and 3.2, Mistral 7B v0.3 and Small 3.2, in the form of their templates.
PARIS = '{"location": "Paris, France", "unit": "celsius"}'
NESTED = '{"q": "a \\"b\\" } ] \\\\", "list": [{"x": 1}, []], "none": null}'
SAMPLES: dict[str, tuple[Dialect, str, Answer]] = {
    "hermes one": (
        HERMES,
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        Answer(calls=[("get_weather", PARIS)]),
    ),
    "hermes text and two": (
        HERMES,
        f'I will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        Answer("I will look.\n", calls=[("get_weather", NESTED), ("get_time", "{}")]),
    ),
    "hermes arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    "hermes more fields": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x}y", "n": [1]}</tool_call> done',
        Answer(" done", calls=[("f", '{"a": 1}')]),
    ),
    "hermes arguments as a text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    "hermes without its end": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    "llama": (
        LLAMA3,
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        Answer(calls=[("get_weather", PARIS)]),
    ),
    "llama with its tag, two": (
        LLAMA3,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "get_time", "parameters": {}}',
        Answer(calls=[("f", '{"a": 1}'), ("get_time", "{}")]),
    ),
    "llama with type": (
        LLAMA3,
        '\n\n{"type": "function", "name": "f", "parameters": {"a": "1"}}',
        Answer(calls=[("f", '{"a": "1"}')]),
    ),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f", "arguments": {{}}}}]',
        Answer(calls=[("get_weather", PARIS), ("f", "{}")]),
    ),
    "mistral with ids": (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}, "id": "9Ae3bDc2F"}]',
        Answer(calls=[("f", '{"a": [1]}')]),
    ),
    "mistral bare": (
        MISTRAL_ARGS,
        f"So.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]f{{}}",
        Answer("So.", calls=[("get_weather", PARIS), ("f", "{}")]),
    ),
    "json": (
        JSON,
        '{"name": "f", "arguments": {"a": 1}}\n{"name": "get_time", "arguments": {}}\n',
        Answer(calls=[("f", '{"a": 1}'), ("get_time", "{}")]),
    ),
    # Broken, or no calls at all: nothing is lost.
    "text": (HERMES, "a < b and <tool> [TOOL", Answer("a < b and <tool> [TOOL")),
    "blank": (HERMES, " \n", Answer(" \n")),
    "empty": (HERMES, "", Answer()),
    "hermes no json": (HERMES, "<tool_call>\nf(1)\n</tool_call>", Answer("<tool_call>\nf(1)\n</tool_call>")),
    "hermes unknown name": (
        HERMES,
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        Answer('<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ),
    "hermes bad json": (
        HERMES,
        '<tool_call>{"name": f, "arguments": {}}</tool_call>',
        Answer('<tool_call>{"name": f, "arguments": {}}</tool_call>'),
    ),
    "hermes cut in the opener": (HERMES, "so <tool_c", Answer("so <tool_c")),
    "hermes cut after the opener": (HERMES, "so <tool_call>\n", Answer("so <tool_call>\n")),
    "hermes cut in the name": (HERMES, '<tool_call>\n{"name": "get_w', Answer('<tool_call>\n{"name": "get_w')),
    "hermes cut in arguments": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "x\\',
        Answer(calls=[("f", '{"a": "x')]),
    ),
    "hermes cut in the closer": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_c',
        Answer(calls=[("f", "{}")]),
    ),
    "hermes half a character": (
        HERMES,
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>',
        Answer('<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>'),
    ),
    "json no number": (
        JSON,
        '{"arguments": {"a": NaN}, "name": "f"}',
        Answer('{"arguments": {"a": NaN}, "name": "f"}'),
    ),
    "llama answers json": (LLAMA3, '{"name": "Bob", "age": 7}', Answer('{"name": "Bob", "age": 7}')),
    "json in a text": (
        JSON,
        'Call {"name": "f", "arguments": {}}',
        Answer('Call {"name": "f", "arguments": {}}'),
    ),
    "json then text": (JSON, '{"name": "f", "arguments": {}} ok', Answer(" ok", calls=[("f", "{}")])),
    "mistral no list": (MISTRAL, "[TOOL_CALLS] none", Answer("[TOOL_CALLS] none")),
    "mistral long bare": (MISTRAL_ARGS, f"[TOOL_CALLS]{LONG}[ARGS]{PARIS}", Answer(calls=[(LONG, PARIS)])),
    "mistral unknown bare": (MISTRAL_ARGS, "[TOOL_CALLS]g[ARGS]{}", Answer("[TOOL_CALLS]g[ARGS]{}")),
    "closes more than it opens": (JSON, '{"name": "f"]}}', Answer('{"name": "f"]}}')),
}


def cuts(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[one:other] for one, other in pairwise(places)]


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str) -> None:
    dialect, text, expected = SAMPLES[name]
    assert parsed(AnswerParser(Manner(dialect, True), NAMES), [text]) == expected
    assert parsed(AnswerParser(Manner(dialect, True), NAMES), list(text)) == expected, "character by character"


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(SAMPLES)), at=st.lists(st.integers(0, 1000), max_size=6))
def test_pieces_change_nothing(name: str, at: list[int]) -> None:
    dialect, text, expected = SAMPLES[name]
    assert parsed(AnswerParser(Manner(dialect, True), NAMES), cuts(text, at)) == expected


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<think>", "</think>", "{", "}")
PIECES = ("[", "]", '"', "\\", " ", "\n", ";", ",", "f", '{"name": "f", "arguments": ', '{"a": 1}', "x", ":")
NOISE = st.lists(st.sampled_from(MARKS + PIECES), max_size=25).map("".join)


@settings(max_examples=600, deadline=None)
@given(
    dialect=st.sampled_from((HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON, None)),
    text=NOISE,
    at=st.lists(st.integers(0, 1000), max_size=6),
    thinks=st.booleans(),
    thinking=st.booleans(),
)
def test_noise_is_parsed_equally_in_pieces(
    dialect: Dialect | None, text: str, at: list[int], thinks: bool, thinking: bool
) -> None:
    def new() -> AnswerParser:
        return AnswerParser(Manner(dialect or HERMES, True, thinks, thinking), NAMES if dialect else ())

    whole = parsed(new(), [text])
    assert parsed(new(), cuts(text, at)) == whole
    if not whole.calls and not whole.reasoning and "think>" not in text:
        assert whole.content == text, "nothing is lost"


@pytest.mark.parametrize("dialect", [LLAMA3, JSON], ids=lambda each: each.name)
def test_a_blank_before_what_is_no_call_is_content(dialect: Dialect) -> None:
    text = ' {"name": "f", "arguments": '
    assert parsed(AnswerParser(Manner(dialect, True), NAMES), [text]).content == text


@pytest.mark.parametrize("dialect", [LLAMA3, JSON], ids=lambda each: each.name)
@pytest.mark.parametrize("thoughts", ["", "<think>Hm.</think>"])
@pytest.mark.parametrize("blank", ["\t", "\r", "\u00a0", "\x1f", "\n\t", "\v "])
def test_a_call_after_a_blank_that_the_grammar_takes_for_text_is_content(
    dialect: Dialect, thoughts: str, blank: str
) -> None:
    text = blank + dialect.write("f", {"a": 1})
    for pieces in ([thoughts + text], list(thoughts + text)):
        answer = parsed(AnswerParser(Manner(dialect, True, thinks=True), NAMES), pieces)
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("dialect", [LLAMA3, JSON], ids=lambda each: each.name)
@pytest.mark.parametrize("blank", [" ", "\n", " \n", "\n\n  "])
def test_a_call_after_spaces_and_line_feeds_is_a_call(dialect: Dialect, blank: str) -> None:
    text = blank + dialect.write("f", {"a": 1})
    for pieces in ([text], list(text)):
        assert parsed(AnswerParser(Manner(dialect, True), NAMES), pieces) == Answer(calls=[("f", '{"a": 1}')])


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON], ids=lambda each: each.name)
def test_what_a_dialect_writes_is_parsed(dialect: Dialect) -> None:
    arguments = {"city": 'Sao "Paulo" \\ {', "n": [1, {"é": None}]}
    answer = parsed(AnswerParser(Manner(dialect, True), NAMES), [dialect.write("f", arguments)])
    assert [(name, json.loads(text)) for name, text in answer.calls] == [("f", arguments)]
    assert not answer.content


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON], ids=lambda each: each.name)
@pytest.mark.parametrize("said", ["", "So. "])
def test_a_further_call_that_is_cut_is_no_content(dialect: Dialect, said: str) -> None:
    said *= dialect.anywhere
    first, second = (dialect.write(name, {"a": 1}) for name in ("f", "get_time"))
    if not dialect.opens_each:  # in one list
        first, second = first.removesuffix(dialect.after + dialect.closer), second.removeprefix(dialect.opener + "[")
    whole = said + first + dialect.between + second
    for length in range(len(said + first), len(whole)):
        for pieces in ([whole[:length]], list(whole[:length])):
            answer = parsed(AnswerParser(Manner(dialect, True), NAMES), pieces)
            assert answer.content == said, whole[:length]
            assert answer.calls[0] == ("f", '{"a": 1}')


def test_blanks_within_the_beginning_of_a_call_take_no_time() -> None:
    text = "[TOOL_CALLS]f" + " " * 2_000
    began = time.process_time()
    assert parsed(AnswerParser(Manner(MISTRAL_ARGS, True), NAMES), list(text)).content == text
    assert time.process_time() - began < 5


BLANKS = [
    (HERMES, ""),
    (LLAMA3, ""),
    (JSON, ""),
    (HERMES, "<tool_call>"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL_ARGS, "[TOOL_CALLS]f"),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
]


@pytest.mark.parametrize(("dialect", "before"), BLANKS)
def test_blanks_without_end_take_no_more_time_the_more_there_are(dialect: Dialect, before: str) -> None:
    """With a bias for blanks each token took milliseconds of its coordinator, in which all streams waited."""
    parser = AnswerParser(Manner(dialect, True, thinks=True), NAMES)
    parser.feed(before)
    began = time.process_time()
    for _ in range(8_000):
        parser.feed(" " * 64)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("formatted", [False, True])
@pytest.mark.parametrize("count", [1_000, 1_010, 1_023, 1_024, 1_100])
@pytest.mark.parametrize(("dialect", "before"), BLANKS)
def test_many_blanks_are_read_alike_in_pieces(dialect: Dialect, before: str, count: int, *, formatted: bool) -> None:
    manner = Manner(dialect, True, thinks=True)
    for after in ("<think>Hm.</think>Yes.", '{"name": "f", "arguments": {"a": 1}}', "{}", dialect.opener + "{}", "."):
        text = before + " " * count + after
        whole = parsed(AnswerParser(manner, NAMES, formatted=formatted), [text])
        assert parsed(AnswerParser(manner, NAMES, formatted=formatted), list(text)) == whole, after
        said = "".join((whole.content, whole.reasoning, *(name + arguments for name, arguments in whole.calls)))
        assert after[-1:] in said


THOUGHTS = {
    "first": (False, "<think>\nHm.\n</think>\n\nYes.", Answer("\n\nYes.", "\nHm.\n")),
    "already begun": (True, "Hm.</think>Yes.", Answer("Yes.", "Hm.")),
    "none": (False, "Yes <think>.", Answer("Yes <think>.")),
    "cut": (False, "<think>Hm.</thi", Answer("", "Hm.</thi")),
    "then a call": (
        False,
        '<think>Hm.</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        Answer("", "Hm.", [("f", "{}")]),
    ),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_apart(name: str) -> None:
    thinking, text, expected = THOUGHTS[name]
    for pieces in ([text], list(text)):
        assert parsed(AnswerParser(Manner(HERMES, True, True, thinking), NAMES), pieces) == expected
    bracketed = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]").replace("</thi", "[/THI")
    manner = Manner(HERMES, True, True, thinking, thoughts=("[THINK]", "[/THINK]"))
    for pieces in ([bracketed], list(bracketed)):
        found = parsed(AnswerParser(manner, NAMES), pieces)
        assert (found.content, found.calls) == (expected.content.replace("<think>", "[THINK]"), expected.calls)
        assert found.reasoning == expected.reasoning.replace("</thi", "[/THI")
