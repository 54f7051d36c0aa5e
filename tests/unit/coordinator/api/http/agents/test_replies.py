"""Answers of sessions in parts: special tokens are marks, and text that a stop string removed stays out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import AddedToken

from coordinator.api.http.agents.bodies import ChatBody, Function
from coordinator.api.http.agents.calls.forms import HERMES, Dialect
from coordinator.api.http.agents.gpt_oss.harmony import HarmonyParser
from coordinator.api.http.agents.manners import HARMONY, HarmonyManner, TextManner, manner_of
from coordinator.api.http.agents.parser import AnswerParser, Parser, PartKind
from coordinator.api.http.agents.replies import chat_input
from coordinator.api.http.agents.response_bodies import ResponsesBody
from coordinator.sessions.detokenizer import TextStream
from coordinator.sessions.output import SessionOutput
from coordinator.sessions.session import Session
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import TokenKind
from outrider.settings.coordinator import CoordinatorSettings
from outrider.speculation.grammar import GrammarCompiler
from outrider.testing.toy_models import byte_tokenizer
from tests.harmony import harmony_tokenizer
from tests.unit.coordinator.api.http.agents.test_tool_grammar import ALL, target_of

THOUGHTS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", *sum(THOUGHTS, ()), "[TOOL_CALLS]", "[ARGS]")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
THINKS = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)


def target_with(*, special: bool) -> Target:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in MARKS])
    nothing: Any = None
    return Target(ModelInfo("m", "f", context_length=2048), tokenizer, nothing, nothing)


def chat(**more: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi."}]} | more)


def dialect_of(target: Target, settings: CoordinatorSettings) -> Dialect:
    return manner_of(target, settings.tool_parser).dialect


def parser_of(manner: TextManner | HarmonyManner, target: Target, tools: Any = TOOLS) -> Parser:
    [parser] = manner.parsers({"f": {}} if tools else {}, chat(tools=tools), target)
    return parser


def read(
    target: Target, read_by: TextManner | Parser, text: str, *, stops: Sequence[str] = (), whole: bool = True
) -> dict[PartKind, str]:
    """Return what each kind of part says, from all tokens at once or one by one."""
    output = SessionOutput(TextStream(target.decode, [], stops))
    for token in target.encode(text):
        output.append([token], [TokenKind.PLAIN])
        if output.rest.stop:
            break
    output.end(finished=True)
    session = cast(Session, SimpleNamespace(output=output))
    parser = read_by if isinstance(read_by, Parser) else parser_of(read_by, target)
    groups = [output.tokens] if whole else [[token] for token in output.tokens]
    said = dict.fromkeys(PartKind, "")
    for group in groups:
        for part in parser.read(session, group, ended=False):
            said[part.kind] += part.text
    for part in parser.read(session, [], ended=True):
        said[part.kind] += part.text
    return {kind: text for kind, text in said.items() if text}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_a_call_is_read_whether_its_marks_are_special_tokens_or_text(special: bool, whole: bool) -> None:
    found = read(target_with(special=special), TextManner(HERMES, True), "So. " + CALL, whole=whole)
    assert found == {PartKind.CONTENT: "So. ", PartKind.CALL: "f", PartKind.ARGUMENTS: '{"a": 1}'}


def test_marks_that_mark_nothing_have_no_text() -> None:
    """As in chats that are not read in parts: a response has the text of its chat."""
    target = target_with(special=True)
    found = read(target, parser_of(TextManner(HERMES, True), target, None), "So <think><tool_call>.")
    assert found == {PartKind.CONTENT: "So ."}


@pytest.mark.parametrize("stop", ["<tool_call>", ". <tool_call>", "<tool"])
def test_a_mark_that_a_stop_string_removed_stays_out(stop: str) -> None:
    text = "So. " + CALL
    found = read(target_with(special=False), TextManner(HERMES, True), text, stops=[stop])
    assert found == {PartKind.CONTENT: text[: text.index(stop)]}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_text_that_may_begin_a_stop_string_comes_before_the_call_after_it(special: bool, whole: bool) -> None:
    found = read(target_with(special=special), TextManner(HERMES, True), "So ST" + CALL, stops=["STOP"], whole=whole)
    assert found == {PartKind.CONTENT: "So ST", PartKind.CALL: "f", PartKind.ARGUMENTS: '{"a": 1}'}


@pytest.mark.parametrize("special", [True, False])
def test_thoughts_that_may_begin_a_stop_string_stay_thoughts(special: bool) -> None:
    manner = TextManner(HERMES, True, thinks=True, thinking=True)
    found = read(target_with(special=special), manner, "Hm ST</think>Yes.", stops=["STOP"])
    assert found == {PartKind.REASONING: "Hm ST", PartKind.CONTENT: "Yes."}


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, PartKind.REASONING),
        ({"reasoning_effort": "none"}, PartKind.CONTENT),
        ({"chat_template_kwargs": {"enable_thinking": False}}, PartKind.CONTENT),
    ],
)
def test_an_answer_is_content_where_the_request_asks_for_no_thoughts(more: dict[str, Any], kind: PartKind) -> None:
    target = target_with(special=True)
    target.tokenizer.chat_template = THINKS
    _, [parser] = chat_input(chat(**more), target, CoordinatorSettings(tool_parser="auto"))
    assert read(target, parser, "Paris.") == {kind: "Paris."}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("opens", "ends"), THOUGHTS)
def test_thoughts_of_magistral_seed_oss_and_command_a_are_apart(
    opens: str, ends: str, special: bool, tools: Any
) -> None:
    """Their marks are special tokens, which have no text: the thoughts ran into the content."""
    target = target_with(special=special)
    target.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{# "
        f"{opens}{ends}"
        "[TOOL_CALLS][ARGS] {{ tools }} #}"
    )
    settings = CoordinatorSettings(tool_parser="auto")
    request, [parser] = chat_input(chat(tools=tools), target, settings)
    said = "Yes." if tools is None else "[TOOL_CALLS]f[ARGS]{}"
    found = read(target, parser, f"{opens}Hm.{ends}{said}")
    answer = {PartKind.CONTENT: said} if tools is None else {PartKind.CALL: "f", PartKind.ARGUMENTS: "{}"}
    assert found == {PartKind.REASONING: "Hm.", **answer}
    if (grammar := request.params.grammar) is not None:
        guide = GrammarCompiler(lambda: tokenizer_json(target.tokenizer), [target.tokenizer.eos_token_id])
        ids = list(target.encode(f"{opens}Hm {{.{ends}{said}"))
        assert guide.compile(SamplingParams(grammar=grammar)).count_allowed(ids) == len(ids)
        wrong = list(target.encode(f"{opens}Hm.{ends}[TOOL_CALLS]g"))
        assert guide.compile(SamplingParams(grammar=grammar)).count_allowed(wrong) == len(wrong) - 1


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("thinks", "text", "reasoning", "content"),
    [
        (True, "<|channel>thought\nHm.\n<channel|>Yes.", "\nHm.\n", "Yes."),
        (True, "<|channel>thought\nHm.", "\nHm.", ""),
        (True, "<|channel>thought<channel|>Yes.", "", "Yes."),
        (False, "A thought.", "", "A thought."),
    ],
)
def test_the_channel_of_gemma_4_is_thoughts(thinks: bool, text: str, reasoning: str, content: str, whole: bool) -> None:
    """Its marks are special tokens: an answer was `thought`, a line feed, the thoughts and the content."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|channel>", "<channel|>")])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if not enable_thinking | default(false) %}"
        "<|channel>thought\n<channel|>{% endif %}"
    )
    nothing: Any = None
    target = Target(ModelInfo("m", "f", context_length=2048), tokenizer, nothing, nothing)
    asked = chat(chat_template_kwargs={"enable_thinking": thinks})
    _, [parser] = chat_input(asked, target, CoordinatorSettings(tool_parser="auto"))
    assert parser.is_thinking() is None
    said = {PartKind.REASONING: reasoning, PartKind.CONTENT: content}
    assert read(target, parser, text, whole=whole) == {kind: text for kind, text in said.items() if text}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes."),
        ("<|channel|>final<|message|>An assistant is.", "", "An assistant is."),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final json<|message|>{}", "Hm.", "{}"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final js", "Hm.", ""),
        ("<|channel|>analysis<|message|>So, assistant", "So, assistant", ""),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", "Hm.", ""),
        ("<|channel|>anal", "", ""),
        ("Yes.", "", "Yes."),
    ],
)
def test_the_channels_of_gpt_oss_are_thoughts_and_content(text: str, reasoning: str, content: str, whole: bool) -> None:
    """Their marks are special tokens: an answer was `analysisHm.assistantfinalYes.`."""
    tokenizer = byte_tokenizer()
    marks = [f"<|{name}|>" for name in ("start", "end", "channel", "message", "return", "constrain")]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "<|start|>assistant{% if not add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{% endif %}"
    )
    nothing: Any = None
    target = Target(ModelInfo("m", "f", context_length=2048), tokenizer, nothing, nothing)
    _, [parser] = chat_input(chat(), target, CoordinatorSettings(tool_parser="auto"))
    found = read(target, parser, text, whole=whole)
    said = {PartKind.REASONING: reasoning, PartKind.CONTENT: content}
    assert found == {kind: text for kind, text in said.items() if text}


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("continued", [True, False])
def test_what_the_grammar_constrains_as_a_call_is_read_as_one(continued: bool, form: str) -> None:
    """An answer that continues a message has no thoughts, and calls begin the answer in some dialects."""
    target, settings = target_of(tokens=False), CoordinatorSettings(tool_parser=ALL[form].name)
    target.tokenizer.chat_template = THINKS.replace("<think>{% endif %}{% endif %}", "{% endif %}{% endif %}")
    body = chat(tools=TOOLS, add_generation_prompt=not continued, continue_final_message=continued)
    request, [parser] = chat_input(body, target, settings)
    dialect = dialect_of(target, settings)
    good, bad = ("<think>Hm.</think>" + dialect.write("f", given) for given in ({}, {"a": 1}))
    grammar = target.grammars.compile(request.params)
    allowed = [grammar.count_allowed(tokens) == len(tokens) for tokens in map(list, map(target.encode, (good, bad)))]
    kinds = [part.kind for part in parser.feed(good) + parser.end()]
    assert allowed == [True, PartKind.CALL not in kinds]
    assert (PartKind.REASONING in kinds) is not continued


ONE_CALL = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{{ m.tool_calls[0] }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}<|python_tag|>{{ tools }}"
)


@pytest.mark.parametrize("template", [ONE_CALL, ONE_CALL.replace("single tool-calls", "").replace("== 1", "> 0")])
def test_an_answer_has_no_more_calls_than_its_template_takes_back(template: str) -> None:
    target, settings = target_of(tokens=False), CoordinatorSettings(tool_parser="auto")
    target.tokenizer.chat_template = template
    for count in (1, 2):
        request, _ = chat_input(chat(tools=TOOLS), target, settings)
        dialect = dialect_of(target, settings)
        text = dialect.between.join([dialect.write("f", {})] * count)
        allowed = target.grammars.compile(request.params).count_allowed(list(target.encode(text)))
        called = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [called] * count}]
        again, _ = chat_input(chat(messages=talk, tools=TOOLS), target, settings)
        with nullcontext() if allowed == len(text) else pytest.raises(InvalidRequest, match="single tool-calls"):
            assert isinstance(again.input, Chat)
            assert target.encode_chat(again.input)
        assert allowed == len(text) or (template, count) == (ONE_CALL, 2)


GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
)


def test_tools_are_told_in_the_first_message_where_none_of_the_system_may_be() -> None:
    target, settings = target_of(tokens=False), CoordinatorSettings(tool_parser="auto")
    target.tokenizer.chat_template = GEMMA
    request, _ = chat_input(chat(tools=TOOLS), target, settings)
    dialect = dialect_of(target, settings)
    assert isinstance(request.input, Chat)
    prompt = target.decode(target.encode_chat(request.input))
    assert prompt.startswith("<user>Hi.\n\nYou can call these functions.")
    two = dialect.between.join([dialect.write("f", {})] * 2)
    assert target.grammars.compile(request.params).count_allowed(list(target.encode(two))) < len(two)
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    answered = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    again, _ = chat_input(chat(messages=[{"role": "user", "content": "Hi."}, *answered], tools=TOOLS), target, settings)
    assert isinstance(again.input, Chat)
    assert target.decode(target.encode_chat(again.input)).endswith("<user>Result of f:\n1\n")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("thinking", "text", "count"),
    [
        (True, "abcd</think>Yes.", 4),
        (False, "<think>abcd</think>Yes.", 5),  # the mark that begins it counts
        (False, "\nYes. <think>no", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(thinking: bool, text: str, count: int, whole: bool) -> None:
    target, manner = target_with(special=True), TextManner(HERMES, True, thinks=True, thinking=thinking)
    assert read(target, manner, text, whole=whole)
    output = SessionOutput(TextStream(target.decode, [], ()))
    output.append(tokens := target.encode(text), [TokenKind.PLAIN] * len(tokens))
    session = cast(Session, SimpleNamespace(output=output))
    parser, late = (parser_of(manner, target) for _ in range(2))
    for group in [output.tokens] if whole else [[token] for token in output.tokens]:
        parser.read(session, group, ended=False)
    late.read(session, output.tokens[:1], ended=False)  # of a request with the same idempotency key
    assert output.thought == count


@pytest.mark.parametrize("whole", [True, False])
def test_tokens_of_all_thoughts_of_gpt_oss_are_counted(whole: bool) -> None:
    nothing: Any = None
    target = Target(ModelInfo("m", "f", context_length=2048), harmony_tokenizer(), nothing, nothing)
    said = (("analysis", "ab"), ("commentary", "x"), ("analysis", "c"), ("final", "Yes."))
    text = "<|start|>assistant".join(f"<|channel|>{channel}<|message|>{it}<|end|>" for channel, it in said)
    output = SessionOutput(TextStream(target.decode, [], ()))
    output.append(tokens := target.encode(text), [TokenKind.PLAIN] * len(tokens))
    session = cast(Session, SimpleNamespace(output=output))
    parser = parser_of(HarmonyManner(HARMONY, True), target)
    for group in [output.tokens] if whole else [[token] for token in output.tokens]:
        parser.read(session, group, ended=False)
    assert output.thought == len("<ab") + len("<c"), "with the marks that begin them"


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_are_possible_to_allowed_tools_only(mode: str, form: str) -> None:
    """The template is told of all of them, so that prompts of other choices have the same beginning."""
    target, settings = target_of(tokens=False), CoordinatorSettings(tool_parser=ALL[form].name)
    target.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    among = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in ("f", "h")]}
    choice = {"type": "allowed_tools", "allowed_tools": among}
    request, _ = chat_input(chat(tools=tools, tool_choice=choice), target, settings)
    dialect = dialect_of(target, settings)
    plain, _ = chat_input(chat(tools=tools), target, settings)
    assert request.input == plain.input
    grammar = target.grammars.compile(request.params)
    possible = {}
    for name in "fgh":
        tokens = list(target.encode(dialect.write(name, {})))
        possible[name] = grammar.count_allowed(tokens) == len(tokens)
    assert possible == {"f": True, "g": False, "h": True}
    said = list(target.encode("Sunny."))
    assert (grammar.count_allowed(said) == len(said)) is (mode == "auto")
    two = list(target.encode(dialect.write_all([{"name": "f", "arguments": {}}] * 2)))
    assert grammar.count_allowed(two) == len(two)


def test_a_long_answer_is_parsed_at_once_after_its_reasoning() -> None:
    """Token by token, the parser would look at all blanks before a call again and again."""
    target, manner = target_with(special=True), TextManner(HERMES, True, thinks=True)
    output = SessionOutput(TextStream(target.decode, [], ()))
    output.append(tokens := target.encode("<think>abc</think><tool_call>" + " " * 500), [TokenKind.PLAIN] * len(tokens))
    parser = parser_of(manner, target)
    fed: list[str] = []
    feed = parser.feed
    parser.feed = lambda text: (fed.append(text), feed(text))[1]  # type: ignore[method-assign]
    parser.read(cast(Session, SimpleNamespace(output=output)), output.tokens, ended=False)
    assert len(fed) < 10


LACKED: list[dict[str, Any]] = [  # patterns are those of Zod for e-mail addresses and of Pydantic for decimals
    {"type": "string", "format": "path"},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "object", "propertyNames": {"type": "string"}},
    {"oneOf": [{"type": "object", "properties": {name: {"type": "string"}}} for name in "xy"]},
    {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([\w'+\-\.]*)[\w+-]@(\w+\.)+[A-Za-z]{2,}$",
    },
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
    {"type": "object", "properties": {"pattern": {"type": "string", "pattern": r"\\\ba"}, "b": {"pattern": r"(a)\1"}}},
]


@pytest.mark.parametrize("field", LACKED)
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_object"}}], ids=["text", "formatted"])
def test_keywords_that_grammars_lack_are_refused_of_strict_tools_only(
    field: dict[str, Any], form: str, more: dict[str, Any]
) -> None:
    """Tools of MCP servers have them, which no client can change."""
    target = target_of(tokens=False)
    target.tokenizer.chat_template = "{{ tools }}"
    settings = CoordinatorSettings(tool_parser=ALL[form].name)
    schema = {"properties": {"m": field, "n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

    def allowed(arguments: dict[str, Any], **tool: Any) -> bool:
        function = {"name": "f", "parameters": schema, **tool}
        request, _ = chat_input(chat(tools=[{"type": "function", "function": function}], **more), target, settings)
        text = list(target.encode(dialect_of(target, settings).write("f", arguments)))
        return target.grammars.compile(request.params).count_allowed(text) == len(text)

    assert allowed({"n": 1})
    assert allowed({"n": 1}, parameters={**schema, "x-guidance": {"whitespace_pattern": "[ ]"}})
    assert not allowed({"n": "x"}), "what grammars have still holds"
    with pytest.raises(InvalidRequest):
        allowed({"n": 1}, strict=True)


@pytest.mark.parametrize("field", LACKED)
@pytest.mark.parametrize("api", ["chat", "beside tools", "response"])
@pytest.mark.parametrize("options", [{}, {"x-guidance": {"whitespace_pattern": "[ ]"}}], ids=["plain", "guided"])
def test_keywords_that_grammars_lack_are_refused_of_strict_formats_only(
    field: dict[str, Any], api: str, options: dict[str, Any]
) -> None:
    """Instructor sends schemas of pydantic models without `strict`, with which OpenAI takes any."""
    target = target_of(tokens=False)
    target.tokenizer.chat_template = "{{ tools }}"
    settings = CoordinatorSettings(tool_parser="llama3")
    schema = {"properties": {"m": field, "n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

    def allowed(text: str, **more: Any) -> bool:
        form = {"name": "f", "schema": {"type": "object", **schema, **options}, **more}
        wanted = {"response_format": {"type": "json_schema", "json_schema": form}}
        body = chat(**wanted, tools=TOOLS * (api == "beside tools"))
        if api == "response":
            text_ = {"format": {"type": "json_schema", **form}}
            body = ResponsesBody.model_validate({"input": "Hi.", "text": text_}).chat
        request, _ = chat_input(body, target, settings)
        tokens = list(target.encode(text))
        return target.grammars.compile(request.params).count_allowed(tokens) == len(tokens)

    for more in ({}, {"strict": None}, {"strict": False}):
        assert allowed('{"n": 1}', **more)
        assert not allowed('{"n": "x"}', **more), "what grammars have still holds"
    with pytest.raises(InvalidRequest):
        allowed('{"n": 1}', strict=True)


def test_only_patterns_that_look_around_or_back_are_left_out() -> None:
    def taken(schema: dict[str, Any], strict: bool | None = None) -> dict[str, Any]:
        function = Function(name="f", parameters={"properties": schema}, strict=strict)
        return cast(dict[str, Any], function.schema_of_arguments["properties"])

    kept: list[dict[str, Any]] = [
        *({"pattern": pattern} for pattern in (r"\(\?=x", r"\\b", r"x\\1", "(?<name>a)", "(?:a)", r"^\d+$")),
        {"properties": {"pattern": {"const": {"pattern": r"(?=a)"}}}},
        {"enum": [{"pattern": r"\b"}], "default": None},
    ]
    assert [taken({"a": part}) for part in kept] == [{"a": part} for part in kept]
    left = ("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", r"\bword", r"\\\Bx", r"(a)\1", r"(?<n>a)\k<n>", "(?P<n>a)(?P=n)")
    nested = {"a": {"anyOf": [{"items": [{"type": "string", "pattern": pattern}]} for pattern in left]}}
    assert taken(nested)["a"]["anyOf"] == [{"items": [{"type": "string"}]}] * len(left)
    assert taken(nested, strict=True) == nested


@pytest.mark.parametrize(("form", "kept"), [("hermes", False), ("mistral bare", False), ("qwen3_coder", True)])
def test_schemas_are_made_once_and_kept_where_they_tell_what_values_are(
    monkeypatch: pytest.MonkeyPatch, form: str, kept: bool
) -> None:
    """Each choice had schemas of its own, of all tools, for as long as the answer takes."""
    target, made = target_of(tokens=False), list[str]()
    target.tokenizer.chat_template = "{{ tools }}"
    of = cast(property, Function.schema_of_arguments).fget
    assert of is not None
    counted = property(lambda function: (made.append(function.name), of(function))[1])
    monkeypatch.setattr(Function, "schema_of_arguments", counted)
    settings = CoordinatorSettings(tool_parser=ALL[form].name)
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    _, parsers = chat_input(chat(tools=tools, n=3), target, settings)
    assert (made, len(parsers)) == (["f", "g"], 3)
    held = [it for one in parsers for it in vars(one).values() if isinstance(it, dict) and it.keys() == {"f", "g"}]
    assert len(held) == 3 * kept


def test_an_answer_that_is_all_content_is_not_parsed() -> None:
    target, settings = target_of(tokens=False), CoordinatorSettings(tool_parser="auto")
    for template, tools, kind in (("", None, Parser), ("", TOOLS, AnswerParser), ("</think>", None, AnswerParser)):
        target.tokenizer.chat_template = template or "{{ tools }}"
        assert [type(one) for one in chat_input(chat(tools=tools, n=2), target, settings)[1]] == [kind] * 2
    target.tokenizer.chat_template = "<|channel|>final"
    assert [type(one) for one in chat_input(chat(), target, settings)[1]] == [HarmonyParser]
