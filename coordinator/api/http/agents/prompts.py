"""Chats as prompts: tools for templates that know them, and instructions in words for the others."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from coordinator.api.http.agents.bodies import ChatFields, Tool
from coordinator.api.http.agents.calls.forms import Dialect, give_ids
from coordinator.api.http.agents.parser import Manner
from coordinator.api.preprocess import one_system
from coordinator.workers.chat_template import Chat
from coordinator.workers.target import Target

_INSTRUCTIONS = """You can call these functions. Each line is one of them, with the JSON schema of its parameters:
{tools}
To call a function, answer with nothing but its name and its arguments, in this form:
{form}"""
_FIELDS = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}


def chat_of(body: ChatFields, tools: Sequence[Tool], manner: Manner, target: Target) -> Chat:
    """Return the chat of a body as the target's template reads it."""
    messages = one_system((message.plain for message in body.messages), target)
    for named in (it for message in messages for it in (message, *message.get("tool_calls", ()))):
        if manner.dialect.name == "mistral":  # its templates raise errors for other ids
            named.update({key: named[key].rjust(9, "0")[-9:] for key in ("id", "tool_call_id") if key in named})
    give_ids(messages, manner.dialect)
    absent: dict[str, Any] = _FIELDS if manner.all_fields else {}
    functions = (absent | tool.function.model_dump(exclude_none=True, exclude={"strict", "type"}) for tool in tools)
    described = [{"type": "function", "function": function} for function in functions]
    if not manner.knows_tools:
        _put_in_words(messages, manner.dialect, ("calls", "results"))
        if described:
            _instruct(messages, described, manner.dialect, target)
        described = []
    elif any("tool_calls" in message for message in messages):
        _put_in_words(messages, manner.dialect, target.dropped[bool(described)])
    chat = Chat(messages, described, body.add_generation_prompt, body.continue_final_message, body.variables)
    return manner.readable(chat)


def _instruct(messages: list[dict[str, Any]], tools: Sequence[Any], dialect: Dialect, target: Target) -> None:
    """Add instructions to the system message, new or given; to the first other one where the template shows none."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines, form=dialect.write("NAME", {"PARAMETER": "VALUE"}))
    shown, given = target.shows("system", "user"), messages[0]["role"] == "system"
    if shown and not given:
        messages.insert(0, {"role": "system", "content": ""})
    told = messages[1] if given and not shown and len(messages) > 1 else messages[0]
    told["content"] = f"{told['content']}\n\n{text}".lstrip()


def _put_in_words(messages: Sequence[dict[str, Any]], dialect: Dialect, parts: Collection[str]) -> None:
    """Write calls into the texts of assistants, and their results into messages of the user, as `parts` has them."""
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if "results" in parts and (id_ := message.pop("tool_call_id", None)) is not None:
            message.update(role="user", content=f"Result of {names.get(id_, 'a function')}:\n{message['content']}")
        if "calls" in parts and calls:
            written = dialect.write_all(call["function"] for call in message.pop("tool_calls"))
            message["content"] = "\n".join(filter(None, [message["content"], written]))
