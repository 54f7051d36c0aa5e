"""Chats as text for the target: what clients write never becomes one of its control tokens.

Text that spells a control token (`<|im_start|>`) is cut inside the token
before the template is rendered, and the pieces are encoded one by one. A chat
that spells none is rendered and encoded as it always was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

_PRIVATE = range(0xE000, 0xF900)  # characters without a meaning


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Find the special tokens of a vocabulary in text; other added ones are ordinary text by their author's word."""
    named = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    named |= set(tokenizer.all_special_tokens)
    long = sorted((token for token in named if len(token) > 1), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, long))) if long else None


class Cut:
    """The messages of a chat with their control tokens cut in two, and the rendered text as pieces again."""

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
        """Until none is left: one may begin inside another."""
        while control.search(text):
            text = control.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)
        return text


def _unused(texts: Iterable[str]) -> str:
    used = set().union(*texts)
    return next(chr(code) for code in _PRIVATE if chr(code) not in used)
