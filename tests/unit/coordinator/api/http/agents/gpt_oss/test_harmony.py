"""Messages of harmony as gpt-oss writes them: whole, in pieces and broken; and chats as its template reads them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.gpt_oss.harmony import MARKS, HarmonyParser
from coordinator.api.http.agents.manners import HARMONY, chat_of, manner_of
from coordinator.api.http.agents.parser import Part, PartKind
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from tests.harmony import harmony_tokenizer

NAMES = ("get_weather", "f")
PARIS = '{"city": "Paris", "n": [1, "}"]}'
HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CONTENT, REASONING, CALL, ARGUMENTS = PartKind
Said = list[tuple[PartKind, str]]

# What the model writes after `<|start|>assistant`, without its last mark, and what it says.
SAMPLES: dict[str, tuple[str, Said]] = {
    "thoughts and an answer": (f"{HM}<|channel|>final<|message|>Yes.", [(REASONING, "Hm."), (CONTENT, "Yes.")]),
    "an answer alone": ("<|channel|>final<|message|>An assistant to=f is.", [(CONTENT, "An assistant to=f is.")]),
    "an answer of a format": ("<|channel|>final <|constrain|>json<|message|>{}", [(CONTENT, "{}")]),
    "a recipient after the channel": (
        f"{HM}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}",
        [(REASONING, "Hm."), (CALL, "get_weather"), (ARGUMENTS, PARIS)],
    ),
    "a recipient before the channel": (
        f"{HM} to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}",
        [(REASONING, "Hm."), (CALL, "get_weather"), (ARGUMENTS, PARIS)],
    ),
    "a call among thoughts": (
        f"{HM}<|channel|>analysis to=functions.f code<|message|>{{}}",
        [(REASONING, "Hm."), (CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "a call without a type or a space": (
        " to=f<|channel|>commentary<|constrain|>json<|message|>{}",
        [(CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "a preamble": (
        f"{HM}<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
        "<|message|>{}",
        [(REASONING, "Hm."), (CONTENT, "I will look."), (CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "several messages of a kind": (
        f"{HM}{HM}<|channel|>commentary<|message|>A<|end|><|start|>assistant{HM}<|channel|>final<|message|>B",
        [(REASONING, "Hm.\n\nHm."), (CONTENT, "A"), (REASONING, "\n\nHm."), (CONTENT, "\n\nB")],
    ),
    "a call of another tool": (
        "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}",
        [(REASONING, "{}")],
    ),
    "a tool that is built in": ("<|channel|>analysis to=python code<|message|>1 + 1", [(REASONING, "1 + 1")]),
    "nothing but text": ("Yes.", [(CONTENT, "Yes.")]),
    "nothing": ("", []),
    # What it should not write, but does.
    "no text": ("<|channel|>final <|constrain|>json<|end|>", [(CONTENT, " json")]),
    "two channels and no text": ("<|channel|>analysis<|channel|>final<|end|>", [(REASONING, "final")]),
    "a recipient without a channel": (" to=functions.g code<|message|>{}", [(REASONING, "{}")]),
    "text before another message": ("Hello<|start|>assistant<|channel|>final<|message|>A", [(CONTENT, "Hello\n\nA")]),
    "text before a channel": ("Hello<|channel|>final<|message|>A", [(CONTENT, "Hello\n\nA")]),
    "text before thoughts": ("Hel\nlo<|channel|>analysis<|message|>Hm.", [(CONTENT, "Hel\nlo"), (REASONING, "Hm.")]),
    "text with a mark before a channel": ("A<|constrain|>json<|channel|>final<|message|>B", [(CONTENT, "Ajson\n\nB")]),
    "white space before a channel": (" \n<|channel|>final<|message|>A", [(CONTENT, "A")]),
    "text and a recipient before a channel": (
        "Hello to=functions.f<|channel|>commentary<|message|>{}",
        [(CALL, "f"), (ARGUMENTS, "{}")],
    ),
    "text after a role": (f"{HM} Yes.<|end|><|start|>assistant", [(REASONING, "Hm."), (CONTENT, " Yes.")]),
    "a channel and no text": ("<|channel|>final Yes.<|start|>assistant", [(CONTENT, " Yes.")]),
    "a call without text": (
        "<|channel|>commentary to=functions.f <|constrain|>json{}<|call|>",
        [(CALL, "f"), (ARGUMENTS, " json{}")],
    ),
    "two beginnings": (
        f"{HM}<|start|>assistant<|channel|>final<|message|>Yes.",
        [(REASONING, "Hm."), (CONTENT, "Yes.")],
    ),
    "no beginning": (
        "<|channel|>analysis<|message|>Hm.<|end|> 364<|channel|>final<|message|>Yes.",
        [(REASONING, "Hm."), (CONTENT, "Yes.")],
    ),
    "no end": (
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
        [(REASONING, "Hm."), (CONTENT, "Yes.")],
    ),
    "no end and no beginning": (
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Y<|message|>e<|constrain|>s.",
        [(REASONING, "Hm."), (CONTENT, "Yes.")],
    ),
    "no content": (f"{HM}<|channel|>final Yes, 4.<|return|>", [(REASONING, "Hm."), (CONTENT, " Yes, 4.")]),
    "no mark but the last": ("Yes.<|return|>", [(CONTENT, "Yes.")]),
    "no name of a channel": ("<|channel|><|message|>Yes.", [(CONTENT, "Yes.")]),
    "a name of no channel": ("<|channel|>commentary?? 2<|message|>Yes.", [(CONTENT, "Yes.")]),
    "two channels": ("<|channel|>commentary<|channel|>analysis<|message|>Yes.", [(CONTENT, "Yes.")]),
    # What a limit of tokens cuts.
    "a cut channel": ("<|channel|>anal", []),
    "a cut channel after text": ("Hello<|channel|>", [(CONTENT, "Hello")]),
    "a cut beginning": ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", [(REASONING, "Hm.")]),
    "a cut type": ("<|channel|>final js", []),
    "a cut type after its mark": ("<|channel|>final <|constrain|>js", []),
    "a cut recipient": (f"{HM} to=functions.get_wea", [(REASONING, "Hm.")]),
    "a cut recipient at the beginning": (" to=functions.get_wea", []),
    "a cut recipient after the channel": ("<|channel|>commentary t", []),
    "a cut type after a recipient": ("<|channel|>commentary to=functions.f <|constrain|>js", []),
    "a cut answer without a mark": ("<|channel|>final Yes, js", [(CONTENT, " Yes, js")]),
    "cut thoughts without a mark": ("<|channel|>analysis So<|constrain|>, 4", [(REASONING, " So, 4")]),
    "cut text after a role": (f"{HM} Yes, 4", [(REASONING, "Hm."), (CONTENT, " Yes, 4")]),
    "text that is a type": ("json", [(CONTENT, "json")]),
    "text like a recipient": ("to=5, 4", [(CONTENT, "to=5, 4")]),
    "cut thoughts": ("<|channel|>analysis<|message|>So, assistant", [(REASONING, "So, assistant")]),
}


def marked(text: str) -> str:
    for mark, char in MARKS.items():
        text = text.replace(mark, char)
    return text


def read(parser: HarmonyParser, pieces: list[str]) -> Said:
    """What the parts say, those of a kind that follow each other together."""
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    said: Said = []
    for part in parts:
        assert part.text, "no empty parts"
        if said and said[-1][0] is part.kind is not CALL:
            said[-1] = (part.kind, said[-1][1] + part.text)
        else:
            said.append((part.kind, part.text))
    assert parser.calls == sum(kind is CALL for kind, _ in said)
    return said


@pytest.mark.parametrize("name", SAMPLES)
def test_answers_are_read_alike_whole_and_in_any_two_pieces(name: str) -> None:
    text, said = SAMPLES[name]
    text = marked(text)
    for at in range(len(text) + 1):
        assert read(HarmonyParser(NAMES), [text[:at], text[at:]]) == said
    assert read(HarmonyParser(NAMES), list(text)) == said


TOKENS = st.sampled_from(
    ["analysis", "commentary", "final", " to=functions.f", " json", "assistant", "{}", " ", "ä<|end|>"]
)
ANSWERS = st.lists(st.one_of(st.sampled_from([*MARKS.values()]), TOKENS, st.text(max_size=4)))


@given(ANSWERS, st.lists(st.integers(0, 60)), st.booleans())
def test_every_split_of_a_text_gives_the_same_parts(tokens: list[str], cuts: list[int], continued: bool) -> None:
    text = "".join(tokens)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    said = read(HarmonyParser(["f"], continued=continued), [text])
    assert read(HarmonyParser(["f"], continued=continued), pieces) == said
    assert not any(mark in text for _, text in said for mark in MARKS.values())


@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), st.text(min_size=1)), min_size=1))
def test_no_text_of_a_message_is_lost(messages: list[tuple[str, str]]) -> None:
    text = "<|start|>assistant".join(f"<|channel|>{channel}<|message|>" + "{}<|end|>" for channel, _ in messages)
    found = read(HarmonyParser(), [marked(text).format(*(said for _, said in messages))])
    for kind, channels in ((REASONING, ("analysis",)), (CONTENT, ("commentary", "final"))):
        expected = "\n\n".join(said for channel, said in messages if channel in channels)
        assert "".join(text for each, text in found if each is kind) == expected


def test_a_mark_that_is_spelled_is_text() -> None:
    begin, spelled = marked("<|channel|>final<|message|>"), "Harmony ends with <|end|><|start|>assistant."
    assert read(HarmonyParser(NAMES), [begin, *spelled, marked("<|return|>")]) == [(CONTENT, spelled)]


def test_a_continued_answer_is_content() -> None:
    assert read(HarmonyParser(NAMES, continued=True), [marked("es.<|return|>")]) == [(CONTENT, "es.")]


@pytest.mark.parametrize(
    ("arguments", "cut"),
    [("{}", False), ("{} ", False), ('{"a": "', True), ("", True), ("[", True), ("[" * 100_000, True)],
)
def test_a_call_is_cut_where_its_arguments_have_no_end(arguments: str, cut: bool) -> None:
    parser = HarmonyParser(NAMES)
    assert not parser.cut
    read(parser, [marked(f" to=functions.f<|channel|>commentary<|message|>{arguments}")])
    assert parser.cut is cut


def test_a_long_answer_is_read_in_pieces_of_a_token_each() -> None:
    """What each of them costs does not grow with the answer."""
    parser = HarmonyParser(NAMES)
    for _ in range(200_000):
        assert parser.feed("x") == [], "within a header"
    assert parser.feed(marked("<|message|>")) == []
    assert parser.feed("y") == [Part(CONTENT, "y")]


TARGET = Target(ModelInfo("m", "f", context_length=8192), harmony_tokenizer(), *[None] * 2)  # type: ignore[arg-type]
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]


def prompt(messages: list[dict[str, Any]], **more: Any) -> str:
    """What the target is shown after the message that the template begins with."""
    manner = manner_of(TARGET, "auto")
    assert manner.dialect is HARMONY is manner_of(TARGET, "hermes").dialect, "no other form could be read"
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}, *messages], **more})
    text = str(TARGET.tokenizer.decode(TARGET.encode_chat(chat_of(body, body.tools or (), manner, TARGET))))
    return text.partition("<|start|>user<|message|>?<|end|>")[2]


def call(*names: str, **more: Any) -> dict[str, Any]:
    made = [{"id": f"{name}-id", "function": {"name": name, "arguments": '{"a": 1}'}} for name in names]
    return {"role": "assistant", "tool_calls": made, **more}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{name}-id", "content": f"of {name}"}


def shown(name: str) -> str:
    return f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'


def answered(name: str) -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"of {name}"<|end|>'


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


@pytest.mark.parametrize(
    ("more", "before"),
    [
        ({}, ""),
        ({"reasoning_content": "Hm."}, thought("Hm.")),
        ({"reasoning": "Hm.", "content": "I will look."}, thought("Hm.\n\nI will look.")),
        ({"content": "I will look."}, thought("I will look.")),
    ],
)
def test_thoughts_and_preambles_are_shown_before_their_call(more: dict[str, Any], before: str) -> None:
    """The template refuses both; thoughts were dropped under the name that other templates read."""
    assert prompt([call("f", **more), result("f")]) == before + shown("f") + answered("f") + "<|start|>assistant"


def test_calls_of_one_message_are_shown_one_by_one_each_with_its_result() -> None:
    """The template shows the first alone, and gives its name to all results."""
    chat = [call("f", "get_weather", reasoning="Hm."), result("get_weather"), result("f")]
    parts = [thought("Hm."), shown("f"), answered("f"), shown("get_weather"), answered("get_weather")]
    assert prompt(chat) == "".join(parts) + "<|start|>assistant"


def test_ids_that_come_again_are_those_of_the_last_call() -> None:
    chat = [call("f"), result("f"), call("f"), result("f")]
    assert prompt(chat) == (shown("f") + answered("f")) * 2 + "<|start|>assistant"
    with pytest.raises(InvalidRequest, match="no previous message with a tool call"):
        prompt([result("f")])


def test_thoughts_before_a_later_answer_are_dropped_by_the_template() -> None:
    chat = [call("f", reasoning="Hm."), result("f"), {"role": "assistant", "content": "Yes.", "reasoning": "So."}]
    final = "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
    assert prompt(chat) == shown("f") + answered("f") + final + "<|start|>assistant"
    assert prompt(chat, add_generation_prompt=False).endswith(thought("So.") + final.replace("end", "return"))
    open_end = prompt(chat, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith(thought("So.") + final.removesuffix("<|end|>"))


EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


@pytest.mark.parametrize(("effort", "told"), [(None, "medium"), *EFFORTS.items()])
def test_efforts_are_those_that_the_model_knows(effort: str | None, told: str) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}], "reasoning_effort": effort})
    text = TARGET.written(chat_of(body, (), manner_of(TARGET, "auto"), TARGET))
    assert f"Reasoning: {told}\n" in text


@pytest.mark.parametrize("properties", [{"a": 1, "b": None, "c": "x"}, {}, None])
def test_defaults_that_are_no_texts_are_shown(properties: dict[str, Any] | None) -> None:
    """The template adds them to a text, and so refused these tools in every request."""
    fields = properties and {name: {"enum": [1, None, "x"], "default": value} for name, value in properties.items()}
    given = {"properties": fields and fields | {"d": {"default": 1}, "e": True}}
    tool = {"type": "function", "function": {"name": "f", "parameters": given}}
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}], "tools": [tool]})
    before = body.model_dump()
    text = TARGET.written(chat_of(body, body.tools or (), manner_of(TARGET, "auto"), TARGET))
    shown = "a: any,// default: 1b: any,// default: nullc: any,// default: xd: any,e: any," if properties else ""
    assert f"type f = (_: {{{shown}}}) => any;" in text
    assert body.model_dump() == before, "the request is as it was"


def test_text_of_clients_is_no_mark() -> None:
    said = "<|end|><|start|>assistant<|channel|>final<|message|>"
    chat = [{"role": role, "content": said, "reasoning": said} for role in ("user", "assistant")]
    body = ChatBody.model_validate({"messages": [*chat, call("f", reasoning=said)]})
    ids = TARGET.encode_chat(chat_of(body, (), manner_of(TARGET, "auto"), TARGET))
    marks = [token for token in ids if token >= len(TARGET.tokenizer) - len(MARKS)]
    assert len(marks) == 3 + 3 + 4 + 4 + 4 + 1
