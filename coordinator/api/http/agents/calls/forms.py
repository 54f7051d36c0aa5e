"""Dialects: the forms in which families of models write tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count
from typing import Any

from coordinator.api.http.agents.calls.values import as_json, as_text


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form of tool calls. Without an opener that is required, calls must begin the answer."""

    name: str
    opener: str = ""  # marks the beginning of a call, or of a list of them
    closer: str = ""  # the end of what the opener began
    opens_each: bool = False  # each call has an opener of its own
    anywhere: bool = False  # calls may follow text: the opener is required
    before: str = ""  # between opener and call
    after: str = ""  # between call and closer
    between: str = "\n"  # calls
    arguments: str = "arguments"  # name of the field with the arguments
    tail: str = "}"  # of a call, after its arguments
    spaced: bool = False  # white space is free within a list of calls
    bare: bool = False  # calls are objects that nothing marks but their place
    alone: str = ""  # mark with which a call may begin without the opener
    value: str = ""  # between the name of an argument and a text, where arguments are no JSON object

    def head(self, name: str) -> str:
        """Return the text of a call up to its arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '

    def body(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of arguments."""
        return as_json(arguments)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call as a model would write it."""
        return self.write_all([{"name": name, "arguments": arguments}])

    def write_all(self, calls: Iterable[Mapping[str, Any]]) -> str:
        """Return the text of all calls of an answer."""
        texts = [self.head(call["name"]) + self.body(call["arguments"]) + self.tail for call in calls]
        begins, ends = (self.opener + self.before, self.after + self.closer) if not self.bare else ("", "")
        between = f"{ends}{self.between}{begins}" if self.opens_each else self.between
        return begins + between.join(texts) + ends

    @property
    def marks(self) -> str:
        """Return all texts that mark calls."""
        return "\n".join(text for text in astuple(self) if isinstance(text, str))


@dataclass(frozen=True, slots=True)
class Marked(Dialect):
    """A form in which marks are around a call's name and its arguments: a JSON object, or values with marks each.

    A 0 in the marks around a name stands for any number.
    """

    anywhere: bool = True
    tail: str = ""
    begin: str = ""  # before the name
    named: str = ""  # after it
    key: str = ""  # before the name of an argument, where these have tags; in Python, there is none
    other: str = ""  # instead, before another value; empty: the same
    ends: str = ""  # after a value
    written: Callable[[Any], str] = as_text  # a value
    ids: str = ""  # of calls within a chat, where the form has them in its marks

    def head(self, name: str) -> str:
        return self.begin + name + self.named

    def body(self, arguments: Mapping[str, Any]) -> str:
        if not self.value:
            return as_json(arguments)
        opens = {True: self.value, False: self.other or self.value}
        pairs = ((name, it, opens[isinstance(it, str)]) for name, it in arguments.items())
        text = "".join(f"{self.key}{name}{mark}{self.written(it)}{self.ends}" for name, it, mark in pairs)
        return text if self.key else text.removesuffix(self.ends)


def _of(name: str, around: Sequence[str], call: str, argument: str = "", **more: Any) -> Marked:
    """Return a form from what is around its calls, outside and inside before and after them, and from examples."""
    opener, before, after, closer = around
    begin, named, tail = re.split("NAME|ARGUMENTS", call)
    key, value, ends = re.split("KEY|VALUE", argument or "KEYVALUE")
    marks = Marked(name, opener, closer, before=before, after=after, begin=begin, named=named, tail=tail)
    return replace(marks, key=key, value=value, ends=ends, **more)


HERMES = Dialect("hermes", "<tool_call>", "</tool_call>", opens_each=True, anywhere=True, before="\n", after="\n")
LLAMA3 = Dialect("llama3", "<|python_tag|>", between="; ", arguments="parameters", bare=True)
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", "]", anywhere=True, before="[", between=", ")
JSON = Dialect("json", bare=True)
_LIST: dict[str, Any] = {"anywhere": True, "between": ",", "spaced": True}
NEMOTRON = Dialect("nemotron", "<TOOLCALL>", "]</TOOLCALL>", before="[", **_LIST)
HUNYUAN = Dialect("hunyuan_a13b", "<tool_calls>", "]</tool_calls>", before="[", **_LIST)
GRANITE = Dialect("granite", "<|tool_call|>", "]", before="[", **_LIST)
PHI4 = Dialect("phi4_mini_json", "functools[", "]", **_LIST)
_EACH: dict[str, Any] = {"opens_each": True, "between": ""}
MISTRAL_ARGS = _of("mistral", ("[TOOL_CALLS]", "", "", ""), "NAME[ARGS]ARGUMENTS", **_EACH)
_XML, _FUNCTION = ("<tool_call>", "\n", "\n", "</tool_call>"), "<function=NAME>\nARGUMENTS</function>"
_ALONE: dict[str, Any] = {"opens_each": True, "alone": "<function="}
QWEN3_CODER = _of("qwen3_coder", _XML, _FUNCTION, "<parameter=KEY>\nVALUE\n</parameter>\n", **_ALONE)
MIMO = _of("mimo", _XML, _FUNCTION, "<parameter=KEY>VALUE</parameter>\n", **_ALONE)
SEED_OSS = replace(MIMO, name="seed_oss", opener="<seed:tool_call>", closer="</seed:tool_call>")
_PLAIN, _LINES = ("<tool_call>", "", "", "</tool_call>"), "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
GLM45 = _of("glm45", _PLAIN, "NAME\nARGUMENTS", _LINES, opens_each=True)
GLM47 = _of("glm47", _PLAIN, "NAMEARGUMENTS", _LINES.replace("\n", ""), **_EACH)
MINIMAX_M2 = _of(
    "minimax_m2",
    ("<minimax:tool_call>", "\n", "\n", "</minimax:tool_call>"),
    '<invoke name="NAME">\nARGUMENTS</invoke>',
    '<parameter name="KEY">VALUE</parameter>\n',
)
DEEPSEEK_V32 = _of(
    "deepseek_v32",
    ("<｜DSML｜function_calls>", "\n", "\n", "</｜DSML｜function_calls>"),
    '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>',
    '<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n',
    other='" string="false">',
)
DEEPSEEK_V4 = replace(DEEPSEEK_V32, name="deepseek_v4", opener="<｜DSML｜tool_calls>", closer="</｜DSML｜tool_calls>")
_CALLS = ("<｜tool▁calls▁begin｜>", "", "", "<｜tool▁calls▁end｜>")
_BEGIN, _NEXT, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V31 = _of("deepseek_v31", _CALLS, f"{_BEGIN}NAME{_NEXT}ARGUMENTS{_END}", between="")
DEEPSEEK_V3 = _of("deepseek_v3", _CALLS, f"{_BEGIN}function{_NEXT}NAME\n```json\nARGUMENTS\n```{_END}")
KIMI_K2 = _of(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", "", "", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
    between="",
    ids="functions.{name}:{number}",
)
COHERE = _of(
    "cohere",
    ("<|START_ACTION|>", "[\n    ", "\n", "]<|END_ACTION|>"),
    '{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}',
    between=",\n    ",
)
_PYTHON: dict[str, Any] = {"call": "NAME(ARGUMENTS)", "argument": "KEY=VALUE, ", "spaced": True}
LFM2 = _of("lfm2", ("<|tool_call_start|>", "[", "", "]<|tool_call_end|>"), between=", ", written=repr, **_PYTHON)
PYTHONIC = replace(LFM2, name="pythonic", anywhere=False, opener="[", before="", closer="]")
OLMO3 = _of("olmo3", ("<function_calls>", "", "", "</function_calls>"), written=as_json, **_PYTHON)
# The first dialect counts of which a template has all these texts. If it has none of a named one, the last counts.
_SHOWN: tuple[tuple[Dialect, tuple[str, ...]], ...] = (
    (JSON, (HUNYUAN.opener, GLM45.opener, GLM45.key)),  # of Hunyuan's V3 and V4, which cannot be read
    (JSON, ("]<]minimax[>[",)),  # of MiniMax M3, likewise
    (SEED_OSS, (SEED_OSS.opener,)),
    (MIMO, (MIMO.opener, MIMO.begin, f"{MIMO.value}value_1</parameter>")),
    (QWEN3_CODER, (QWEN3_CODER.opener, QWEN3_CODER.begin, QWEN3_CODER.key)),
    (GLM47, (GLM47.opener, GLM47.value)),
    (GLM45, (GLM45.opener, GLM45.key)),
    (MINIMAX_M2, (MINIMAX_M2.opener,)),
    (DEEPSEEK_V32, ("DSML", "function_calls>")),
    (DEEPSEEK_V4, ("DSML", "tool_calls>")),
    (DEEPSEEK_V3, (DEEPSEEK_V3.opener, "```json")),
    (DEEPSEEK_V31, (DEEPSEEK_V31.opener,)),
    (KIMI_K2, (KIMI_K2.opener,)),
    (COHERE, (COHERE.opener,)),
    (NEMOTRON, (NEMOTRON.opener,)),
    (HUNYUAN, (HUNYUAN.opener,)),
    (GRANITE, (GRANITE.opener,)),
    (PHI4, (PHI4.opener,)),
    (HERMES, (HERMES.opener,)),
    (LFM2, ("List of tools: ",)),
    (OLMO3, (OLMO3.opener,)),
    (PYTHONIC, ("[func_name1(",)),
    (MISTRAL_ARGS, (MISTRAL.opener, MISTRAL_ARGS.named)),
    (MISTRAL, (MISTRAL.opener,)),
    (LLAMA3, (LLAMA3.opener,)),
    (LLAMA3, ("<|start_header_id|>", '"parameters"')),
    (LLAMA3, ("<|header_start|>", '"parameters"')),
    (JSON, ()),
)


def dialect_of(template: str, parser: str) -> Dialect:
    """Return the dialect that a chat template shows, among those of this name unless it is `auto`."""
    named = [row for row in _SHOWN if parser in ("auto", row[0].name)]
    return next((dialect for dialect, texts in named if all(text in template for text in texts)), named[-1][0])


def give_ids(messages: Iterable[dict[str, Any]], dialect: Dialect) -> None:
    """Replace the ids of calls by those of the form, if it has its own."""
    numbers, ids = count(), dict[str, str]()
    form = dialect.ids if isinstance(dialect, Marked) else ""
    for message in messages if form else ():
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = form.format(name=call["function"]["name"], number=next(numbers))
            call["id"] = ids[call["id"]]
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
