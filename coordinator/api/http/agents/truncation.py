"""Truncation of chats that are longer than the context: their oldest messages are left out."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.replies import ChatInput
from coordinator.api.preprocess import prompt_tokens
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest


def fitted(chat: ChatBody, plan: Callable[[ChatBody], ChatInput], target: Target, limit: int, room: int) -> ChatInput:
    """Return the input, as tokens, of the chat or the longest shortened one that has room; of none the shortest."""
    tried = dict[bool, ChatInput]()

    def fits(chat: ChatBody) -> bool:
        request, parsers = plan(chat)
        with suppress(InvalidRequest):  # beyond the limit, or in an order that the template refuses
            request = replace(request, input=prompt_tokens(request.input, target, limit))
        fit = isinstance(request.input, tuple) and len(request.input) <= room
        tried[fit] = request, parsers
        return fit

    if not fits(chat):
        bisect_left([*shortened(chat)], True, key=fits)
    return tried.get(True) or tried[False]


def shortened(chat: ChatBody) -> Iterator[ChatBody]:
    """Yield the chat without more and more of its oldest messages: first whole turns, then calls of the last one.

    Instructions and the user's last message stay, and an output has its call.
    """
    last = max((at for at, it in enumerate(chat.messages) if it.role == "user"), default=-1)
    outputs, waiting, kept = Counter(it.tool_call_id for it in chat.messages), set[str | None](), chat.messages[:0]
    for start, first in enumerate(chat.messages):
        if not waiting and (first.role == "user" or (start > last and first.role == "assistant")):
            yield chat.model_copy(update={"messages": kept + chat.messages[start:]})
        kept += [first] * (start == last or first.role in ("system", "developer"))
        outputs[first.tool_call_id] -= 1
        waiting = (waiting | {call.id for call in first.tool_calls or () if outputs[call.id]}) - {first.tool_call_id}
