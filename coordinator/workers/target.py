"""Target: its description and tokenizer, which the coordinator fetches from a verifier."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.workers.chat_template import Chat, control_tokens, cut_control
from coordinator.workers.grammar_trial import GrammarTrial
from outrider.models.tokenizer import PROBE, in_parts, load_tokenizer, tokenizer_json, wants_parts, write_file
from outrider.protocol.checks import check_count
from outrider.protocol.errors import InvalidRequest, shorten
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.vocabulary import Vocabulary
from outrider.speculation.grammar import GrammarCompiler
from outrider.v1 import verifier_pb2 as pb
from outrider.v1 import verifier_pb2_grpc as rpc

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FETCH_TIMEOUT_S = 60.0
MAX_TOKENIZER_BYTES = 128 * 1024 * 1024  # the largest known are around 40 MB
_CHUNK_COST = 1024  # counted per chunk, so that empty chunks are limited too
_READING = ThreadPoolExecutor(2, "tokenizers")  # requests have others, which no verifier's tokenizers hold up
_FIELD = {"type": "object", "properties": {"word": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "note", "description": "Note a word.", "parameters": _FIELD}}
_CALL = {"id": "outrider1", "type": "function", "function": {"name": "note", "arguments": {"word": "outrun"}}}
_SHOWN = {"calls": "outrun", "results": "Noted."}  # what tells in `_CHAT` that they are shown
_CHAT: Sequence[Mapping[str, object]] = [
    PROBE,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "outrider1", "content": "Noted."},
]
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = enumerate((byte for byte in range(256) if byte not in _PRINTABLE), 256)
# Each character's byte in byte-level vocabularies: printable ones their own, others from 256 on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(number): byte for number, byte in _OTHERS}


@dataclass(frozen=True)
class Target:
    """The target with its tokenizer, vocabulary and grammars."""

    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    grammars: GrammarCompiler
    identity: str = ""  # what its verifiers have in common; their sessions continue on each other
    served_name: str = ""  # for clients over HTTP
    _shown: dict[tuple[str, ...], bool] = field(default_factory=dict, init=False, compare=False)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=special))

    def encode_chat(self, chat: Chat, limit: int = sys.maxsize) -> tuple[int, ...]:
        """Return a chat as tokens. Its template may write far more than its texts: numbers, and blanks before each."""
        if not self.tokenizer.chat_template:
            message = f"{self.info.name} has no chat template; send a prompt instead"
            raise InvalidRequest(message, field="chat.messages", value=self.info.name, limit="a target with a template")
        try:
            cut, mark = cut_control(chat, self._control)
            text = self.written(cut)
        except Exception as error:  # templates are programs and may raise anything
            message = f"the chat template rejects these messages: {shorten(str(error))}"
            raise InvalidRequest(message, field="chat.messages") from error
        check_count("chat.messages", len(text), limit, "characters as the chat template writes them")
        pieces = text.replace(f"\\u{ord(mark):x}", mark).split(mark) if mark else [text]  # each has a token at least
        check_count("chat.messages", len(pieces), self.info.context_length, "texts around special tokens")
        encoded = self.tokenizer(pieces, add_special_tokens=False, return_attention_mask=False)
        return tuple(chain.from_iterable(encoded["input_ids"]))

    def written(self, chat: Chat) -> str:
        """Return a chat as its template writes it."""
        messages = [in_parts(it) for it in chat.messages] if self._wants_parts else [*chat.messages]
        more = {"continue_final_message": chat.continue_final_message, "tokenize": False, **chat.variables}
        tools, begins = [*chat.tools] or None, chat.add_generation_prompt
        return str(self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=begins, **more))

    def preview(self, chat: Chat) -> str:
        """Return a chat as its template writes it; nothing if it raises an error, as it will for the prompt."""
        with contextlib.suppress(Exception):  # templates are programs
            return self.written(chat)
        return ""

    def shows(self, *roles: str) -> bool:
        """Return whether the chat template writes messages of all these roles; each case is tried once.

        Some templates drop those of the system, or refuse them.
        """
        if roles not in self._shown:
            chat = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
            text = self.preview(Chat(chat))
            self._shown[roles] = all(message["content"] in text for message in chat)
        return self._shown[roles]

    @cached_property
    def dropped(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return what the chat template drops of a history, calls or results: in chats without tools, and in others.

        Without tools, one that drops either knows neither.
        """
        without, others = (self.preview(Chat(_CHAT, tools)) for tools in ((), [_TOOL]))
        lost = [part for part, word in _SHOWN.items() if word not in others]
        return [*_SHOWN] if any(word not in without for word in _SHOWN.values()) else [], lost

    @cached_property
    def _wants_parts(self) -> bool:
        return wants_parts(self.tokenizer)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which need not be valid text by themselves.

        The tokenizer's decoder tells how its vocabulary writes bytes. Characters cannot: any may be part of a text.
        """
        text = self.vocabulary.tokens[token] if token < len(self.vocabulary.tokens) else ""
        if token in self._added:
            return text.encode()
        if "ByteLevel" in self._decoders:
            return bytes(_BYTES[char] for char in text) if _BYTES.keys() >= set(text) else text.encode()
        if "ByteFallback" in self._decoders and (match := _BYTE_TOKEN.fullmatch(text)) is not None:
            return bytes.fromhex(match[1])
        return text.replace("▁", " ").encode() if self._decoders & {"Metaspace", "Replace"} else text.encode()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Return the types of the tokenizer's decoders."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return frozenset()
        decoder = json.loads(backend.decoder.__getstate__())
        return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        return control_tokens(self.tokenizer)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Return the tokens that were added to the vocabulary, special or not."""
        return frozenset(self.tokenizer.added_tokens_decoder)

    @cached_property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Return the decoder: the tokenizer's Rust backend where transformers' Python around it adds only time."""
        from transformers import PreTrainedTokenizerFast  # here: it was loaded with the tokenizer

        kind, fast = type(self.tokenizer), PreTrainedTokenizerFast
        if all(getattr(kind, name, None) is getattr(fast, name, kind) for name in ("decode", "_decode")):
            return partial(self.tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
        return partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


async def fetch_target(info: ModelInfo, identity: str, verifier: rpc.VerifierAsyncStub) -> Target:
    """Ask a verifier for its tokenizer."""
    with tempfile.TemporaryDirectory(prefix="outrider-tokenizer-") as name:
        folder = Path(name)
        left = MAX_TOKENIZER_BYTES
        async for chunk in verifier.GetTokenizer(pb.GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S):
            left -= len(chunk.data) + _CHUNK_COST
            if left < 0:
                raise InvalidRequest.of("tokenizer files", "larger", f"at most {MAX_TOKENIZER_BYTES} bytes together")
            write_file(folder, chunk.name, chunk.data)
        try:
            tokenizer = await asyncio.get_running_loop().run_in_executor(_READING, load_tokenizer, folder)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # untrusted files: anything, and panics are no Exception
            raise InvalidRequest(f"the verifier's tokenizer cannot be read: {shorten(str(error))}") from error
    definition = partial(tokenizer_json, tokenizer)
    grammars = GrammarCompiler(definition, info.eos_token_ids, GrammarTrial(definition, info.eos_token_ids))
    return Target(info, tokenizer, Vocabulary.of(tokenizer), grammars, identity)
