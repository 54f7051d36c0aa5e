"""Truncation of chats that are longer than the context: their oldest messages are left out."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress

from coordinator.admission.model_limits import limits_of
from coordinator.api.http.agents.bodies import ChatBody
from coordinator.api.http.agents.replies import chat_input
from coordinator.api.preprocess import prompt_tokens
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest
from outrider.settings.coordinator import CoordinatorSettings


def fitted(chat: ChatBody, target: Target, settings: CoordinatorSettings, names: Mapping[str, str]) -> ChatBody:
    """Return the chat, or the longest of the shortened ones that fits; of none the shortest. `names` is for errors."""
    context, limit = limits_of(settings, target).context_of(target), settings.max_prompt_kib * 1024

    def fits(chat: ChatBody) -> bool:
        with suppress(InvalidRequest):  # beyond the limit, or in an order that the template refuses
            tokens = prompt_tokens(chat_input(chat, target, settings, names)[0].input, target, limit)
            return len(tokens) + min(chat.limit or settings.default_chat_tokens, context // 4) <= context
        return False

    left = [] if fits(chat) else [*shortened(chat)]
    return left[bisect_left(left, True, hi=len(left) - 1, key=fits)] if left else chat


def shortened(chat: ChatBody) -> Iterator[ChatBody]:
    """Yield the chat without more and more of its oldest messages: first whole turns, then calls of the last one.

    Instructions and the user's last message stay, and an output has its call.
    """
    last = max((at for at, it in enumerate(chat.messages) if it.role == "user"), default=-1)
    outputs, waiting = Counter(it.tool_call_id for it in chat.messages), set[str | None]()
    for start, first in enumerate(chat.messages):
        if not waiting and (first.role == "user" or (start > last and first.role == "assistant")):
            before = enumerate(chat.messages[:start])
            kept = [it for at, it in before if at == last or it.role in ("system", "developer")]
            yield chat.model_copy(update={"messages": kept + chat.messages[start:]})
        outputs[first.tool_call_id] -= 1
        waiting |= {call.id for call in first.tool_calls or () if outputs[call.id]}
        waiting.discard(first.tool_call_id)
