"""Chat messages as text for the target, in which clients' text never becomes a control token.

Text that spells a control token (`<|im_start|>`) is cut inside it before the template is rendered, and the pieces are
encoded separately. Other chats are rendered and encoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PRIVATE = range(0xE000, 0xF900)  # private-use characters
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})")  # one, in templates that write tools as Python or ASCII


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens. Other added tokens count as ordinary text."""
    named = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    long = {token for token in named.union(tokenizer.all_special_tokens) if len(token) > 1}
    return re.compile(_longest_of(long)) if long else None


def _longest_of(words: Collection[str]) -> str:
    """Return a pattern of the longest of these words at a place. Hundreds side by side take seconds in megabytes."""
    start = "".join(chars[0] for chars in takewhile(lambda chars: len({*chars}) == 1, zip(*words, strict=False)))
    rests = sorted(word[len(start) :] for word in words)
    parts = "|".join(_longest_of([*some]) for char, some in groupby(rests, lambda rest: rest[:1]) if char)
    return re.escape(start) + (f"(?:{parts})" + "?" * ("" in rests) if parts else "")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages of a chat, the tools that it may call, and how the template ends the prompt."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template; no text of clients

    def texts(self) -> Iterator[str]:
        """Yield every text that the client wrote, in any order."""
        left: list[Any] = [*self.messages, *self.tools]
        while left:
            value = left.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, Mapping | list | tuple):
                left += [*value, *value.values()] if isinstance(value, Mapping) else value


def cut_control(chat: Chat, control: re.Pattern[str] | None) -> tuple[Chat, str]:
    """Return a chat with the control tokens in its texts cut in two, and the mark of these cuts, if there are any."""
    if control is None or not any(control.search(text) for text in chat.texts()):
        return chat, ""
    escapes = (chr(int(code, 16)) for text in chat.texts() for code in _ESCAPED.findall(text))
    used = set().union(*chat.texts(), *escapes)
    mark = next(chr(code) for code in _PRIVATE if chr(code) not in used)
    return replace(chat, messages=_cut(chat.messages, control, mark), tools=_cut(chat.tools, control, mark)), mark


def _cut(value: Any, control: re.Pattern[str], mark: str) -> Any:
    """Cut until no control token is left, since one may begin inside another."""
    if isinstance(value, Mapping):
        return {_cut(name, control, mark): _cut(each, control, mark) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(each, control, mark) for each in value]
    while isinstance(value, str) and control.search(value):
        value = control.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    return value
