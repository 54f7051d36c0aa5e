"""Chat messages as text for the target, in which clients' text never becomes a control token.

Text that spells a control token (`<|im_start|>`) is cut inside it before the template is rendered, and the pieces are
encoded separately. Other chats are rendered and encoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

_PRIVATE = range(0xE000, 0xF900)  # private-use characters


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens. Other added tokens count as ordinary text."""
    named = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    named |= set(tokenizer.all_special_tokens)
    long = sorted((token for token in named if len(token) > 1), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, long))) if long else None


class CutMessages:
    """Messages of a chat with their control tokens cut in two; `pieces` splits the rendered text at the cuts."""

    def __init__(self, messages: Sequence[Mapping[str, str]], control: re.Pattern[str] | None) -> None:
        written = [text for message in messages for text in message.values()]
        self._mark = ""
        if control is not None and any(control.search(text) for text in written):
            self._mark = _unused(written)
        self.messages = [
            {
                name: self._cut(text, control) if control is not None and self._mark else text
                for name, text in one.items()
            }
            for one in messages
        ]

    def pieces(self, rendered: str) -> list[str]:
        return rendered.split(self._mark) if self._mark else [rendered]

    def _cut(self, text: str, control: re.Pattern[str]) -> str:
        """Cut until no control token is left, since one may begin inside another."""
        while control.search(text):
            text = control.sub(lambda match: match[0][0] + self._mark + match[0][1:], text)
        return text


def _unused(texts: Iterable[str]) -> str:
    used = set().union(*texts)
    return next(chr(code) for code in _PRIVATE if chr(code) not in used)
