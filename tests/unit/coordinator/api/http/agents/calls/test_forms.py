"""Chat templates: the form of calls that one shows, and chats with calls as it writes them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from coordinator.api.http.agents.calls import forms
from coordinator.api.http.agents.calls.forms import Dialect, dialect_of
from coordinator.api.http.agents.manners import chat_of, manner_of
from outrider.settings.tool_parsers import ToolParser
from tests.unit.coordinator.api.http.agents.test_manners import chat, rendered, target_of

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "<{{ m.role }}{{ ' ' + m.tool_call_id if m.tool_call_id else '' }}>{{ m.content }}{% else %}<assistant>"
    "{{ m.content }}{% for c in m.tool_calls or () %}{% set f = c.function %}"
)
TAIL = "{% endfor %}{% endif %}{% endfor %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
# The part of a call in templates of these families; the whole of a call is what the form itself writes.
CALLS: dict[str, tuple[Dialect, str]] = {
    "qwen3_coder": (
        forms.QWEN3_CODER,
        "{{ '<tool_call>\n<function=' + f.name + '>\n' }}"
        + ITEMS
        + "{{ '<parameter=' + k + '>\n' }}"
        + VALUE
        + "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}",
    ),
    "mimo": (
        forms.MIMO,
        "{# <parameter=example_parameter_1>value_1</parameter> #}{{ '<tool_call>\n<function=' + f.name + '>\n' }}"
        + ITEMS
        + "{{ '<parameter=' + k + '>' }}"
        + VALUE
        + "{{ '</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}",
    ),
    "seed_oss": (
        forms.SEED_OSS,
        "{# <tool_call> #}{{ '<seed:tool_call>\n<function=' + f.name + '>\n' }}"
        + ITEMS
        + "{{ '<parameter=' + k + '>' }}"
        + VALUE
        + "{{ '</parameter>\n' }}{% endfor %}{{ '</function>\n</seed:tool_call>' }}",
    ),
    "glm45": (
        forms.GLM45,
        "{{ '<tool_call>' + f.name + '\n' }}"
        + ITEMS
        + "<arg_key>{{ k }}</arg_key>{{ '\n' }}<arg_value>"
        + VALUE
        + "</arg_value>{{ '\n' }}{% endfor %}</tool_call>{# <arg_key>a</arg_key>\n<arg_value> #}",
    ),
    "glm47": (
        forms.GLM47,
        "{{ '<tool_call>' + f.name }}" + ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>" + VALUE + "</arg_value>"
        "{% endfor %}</tool_call>",
    ),
    "minimax_m2": (
        forms.MINIMAX_M2,
        "{{ '<minimax:tool_call>\n<invoke name=\"' + f.name + '\">\n' }}"
        + ITEMS
        + '<parameter name="{{ k }}">'
        + VALUE
        + "{{ '</parameter>\n' }}{% endfor %}{{ '</invoke>\n</minimax:tool_call>' }}",
    ),
    "kimi_k2": (
        forms.KIMI_K2,
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v31": (
        forms.DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "lfm2": (
        forms.LFM2,
        "{# List of tools: #}<|tool_call_start|>[{{ f.name }}("
        + ITEMS
        + """{{ k }}={{ "'" + v + "'" if v is string else v | string }}{{ ', ' if not loop.last }}{% endfor %})]"""
        + "<|tool_call_end|>",
    ),
    "olmo3": (
        forms.OLMO3,
        "<function_calls>{{ f.name }}("
        + ITEMS
        + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})</function_calls>",
    ),
    "pythonic": (
        forms.PYTHONIC,
        "{# [func_name1(params_name1=params_value1...), func_name2(params)] #}[{{ f.name }}("
        + ITEMS
        + """{{ k }}={{ "'" + v + "'" if v is string else v | string }}{{ ', ' if not loop.last }}{% endfor %})]""",
    ),
}
ARGUMENTS = '{"city": "Köln", "days": 3, "spots": [{"x": null}]}'
CALLED = {"role": "assistant", "tool_calls": [{"id": "a9", "function": {"name": "f", "arguments": ARGUMENTS}}]}
USER, RESULT = {"role": "user", "content": "Hi."}, {"role": "tool", "tool_call_id": "a9", "content": "Sunny."}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("name", CALLS)
def test_a_template_shows_its_form_and_writes_calls_in_it(name: str) -> None:
    form, call = CALLS[name]
    template = HEAD + call + TAIL
    manner = manner_of(target_of(template), "auto")
    assert (manner.dialect, manner.knows_tools) == (form, True)
    text = rendered(template, messages=[USER, CALLED, RESULT], tools=TOOLS)
    written = form.write("f", {"city": "Köln", "days": 3, "spots": [{"x": None}]})
    assert text.endswith(f"<user>Hi.<assistant>{written}<tool {'functions.f:0' if name == 'kimi_k2' else 'a9'}>Sunny.")
    assert '"name": "f"' in text, "the template tells of tools, and not the instructions"
    assert "You can call" not in text


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'",
            forms.DEEPSEEK_V3,
        ),
        ('<{{ dsml_token }}function_calls>{# "｜DSML｜" #}', forms.DEEPSEEK_V32),
        ('<{{ dsml_token }}tool_calls>{# "｜DSML｜" #}', forms.DEEPSEEK_V4),
        ("<tool_calls><tool_call>{{ f.name }}<tool_sep><arg_key>{{ k }}</arg_key>", forms.JSON),
        ("]<]minimax[>[<tool_call>", forms.JSON),
        ("<|START_ACTION|>[", forms.COHERE),
        ("List of tools: <|tool_list_start|>[", forms.LFM2),
        ('in the format [func_name1(params_name1=params_value1...)] <|start_header_id|> "parameters"', forms.PYTHONIC),
        ("""<|header_start|>assistant<|header_end|>{{ '"parameters": ' }}""", forms.LLAMA3),
        ("<TOOLCALL>[{", forms.NEMOTRON),
        ("objects within <tool_call></tool_call>: <tool_calls>[...]</tool_calls>", forms.HUNYUAN),
        ("respond only with <|tool_call|> followed by a JSON list", forms.GRANITE),
        ("formatted as functools[{...}]", forms.PHI4),
    ],
)
def test_other_templates_show_theirs(template: str, form: Dialect) -> None:
    assert dialect_of(template, "auto") is form


def test_each_form_can_be_named_and_reads_its_own_template() -> None:
    names = {dialect.name for dialect, _ in forms._SHOWN}
    assert {"auto", *names} == {*get_args(ToolParser)}
    for name in names:
        assert dialect_of("", name).name == name
    assert dialect_of("[TOOL_CALLS][ARGS]", "mistral") is forms.MISTRAL_ARGS
    assert dialect_of("<tool_call><arg_key>", "hermes") is forms.HERMES


@pytest.mark.parametrize("name", [name for name in CALLS if name != "lfm2"])  # whose mark is told with tools
def test_a_template_that_knows_no_tools_has_them_in_words_in_its_own_form(name: str) -> None:
    """As those of DeepSeek V3.1, which write calls of a chat, and are told nothing of tools."""
    form, call = CALLS[name]
    template = f"{{# {call.replace('{#', '').replace('#}', '')} #}}" + HEAD.partition("{% endif %}")[2] + TAIL
    text = rendered(template, messages=[USER, CALLED, RESULT], tools=TOOLS)
    assert text.startswith("<system>You can call these functions. Each line is one of them")
    assert form.write("NAME", {"PARAMETER": "VALUE"}) in text
    assert form.write("f", {"city": "Köln", "days": 3, "spots": [{"x": None}]}) in text


def test_calls_of_kimi_are_numbered_through_a_chat() -> None:
    called: list[Any] = [
        {
            "role": "assistant",
            "tool_calls": [{"id": it, "function": {"name": name, "arguments": "{}"}} for it, name in some],
        }
        for some in ([("a", "f"), ("b", "g")], [("a", "f")])
    ]
    results = [{"role": "tool", "tool_call_id": it, "content": it} for it in ("b", "a", "c")]
    body = chat(messages=[USER, called[0], *results[:2], called[1], results[1], results[2]])
    template = HEAD + CALLS["kimi_k2"][1] + TAIL
    target = target_of(template)
    made = chat_of(body, (), manner_of(target, "auto"), target).messages
    assert [call["id"] for message in made for call in message.get("tool_calls", ())] == [
        "functions.f:0",
        "functions.g:1",
        "functions.f:2",
    ]
    assert [message["tool_call_id"] for message in made if "tool_call_id" in message] == [
        "functions.g:1",
        "functions.f:0",
        "functions.f:2",
        "c",
    ]


@pytest.mark.parametrize("form", [forms.GRANITE, forms.HERMES, forms.KIMI_K2, forms.LFM2], ids=lambda form: form.name)
def test_a_template_that_drops_calls_has_them_in_the_text_of_the_assistant(form: Dialect) -> None:
    """That of Granite 3.3 tells of tools, and writes an assistant's text alone: the target lost what it had called."""
    template = HEAD.partition("{% for c in")[0] + "{% endif %}{% endfor %}{# List of tools: " + form.opener + " #}"
    called: Any = CALLED | {"content": "So.", "tool_calls": CALLED["tool_calls"] * 2}
    text = rendered(template, messages=[USER, called, RESULT], tools=TOOLS)
    call = {"name": "f", "arguments": {"city": "Köln", "days": 3, "spots": [{"x": None}]}}
    assert f"<assistant>So.\n{form.write_all([call, call])}<tool " in text
    assert text.endswith(">Sunny."), "results are the template's"
    assert "You can call" not in text
