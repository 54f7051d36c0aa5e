"""Chats as prompts: tools for templates that know them, and instructions in words for the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coordinator.api.http.agents.bodies import ChatFields, Tool
from coordinator.api.http.agents.dialects import Dialect, Manner
from coordinator.workers.chat_template import Chat

_INSTRUCTIONS = """You can call these functions. Each line is one of them, with the JSON schema of its parameters:
{tools}
To call a function, answer with nothing but its name and its arguments, in this form:
{form}"""


def chat_of(body: ChatFields, tools: Sequence[Tool], manner: Manner) -> Chat:
    """Return the chat of a body as the target's template reads it."""
    messages = [message.plain for message in body.messages]
    described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
    if not manner.knows_tools or not (described or manner.shows_calls):
        messages = _in_words(messages, manner.dialect)
        messages = _instructed(messages, described, manner) if described else messages
        described = []
    return Chat(messages, described, body.add_generation_prompt, body.continue_final_message, body.variables)


def _instructed(messages: list[dict[str, Any]], tools: Sequence[Any], manner: Manner) -> list[dict[str, Any]]:
    """Add instructions to the system message, or one with them; to the first message if there can be none."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines, form=manner.dialect.write("NAME", {"PARAMETER": "VALUE"}))
    if messages[0]["role"] == "system" or not manner.system:
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _in_words(messages: Sequence[dict[str, Any]], dialect: Dialect) -> list[dict[str, Any]]:
    """Write calls into the texts of assistants, and their results into messages of the user."""
    names: dict[str, str] = {}
    plain = []
    for message in messages:
        content = message["content"]
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        names |= {id_: function["name"] for id_, function in calls}
        lines = [content, *(dialect.write(function["name"], function["arguments"]) for _, function in calls)]
        if message["role"] == "tool":
            name = names.get(message["tool_call_id"], "a function")
            plain.append({"role": "user", "content": f"Result of {name}:\n{content}"})
        else:
            plain.append({"role": message["role"], "content": "\n".join(lines if content else lines[1:] or lines)})
    return plain
