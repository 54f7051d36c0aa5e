"""The target as the coordinator knows it: its description and its tokenizer, both got from a verifier."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outrider.errors import InvalidRequest
from outrider.grammar import Grammars
from outrider.messages import ModelInfo
from outrider.tokenizer import as_json, load_tokenizer, write_file
from outrider.v1 import verifier_pb2 as pb
from outrider.v1 import verifier_pb2_grpc as rpc
from outrider.vocabulary import Vocabulary

FETCH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    grammars: Grammars

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=special))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        if not self.tokenizer.chat_template:
            raise InvalidRequest(
                f"{self.info.name} has no chat template; send a prompt instead",
                field="chat",
                value=self.info.name,
                limit="a target with a chat template",
            )
        try:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="chat.messages") from error
        return self.encode(str(text), special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


async def fetch_target(info: ModelInfo, verifier: rpc.VerifierAsyncStub) -> Target:
    """Ask a verifier for its tokenizer."""
    with tempfile.TemporaryDirectory(prefix="outrider-tokenizer-") as name:
        folder = Path(name)
        seen: set[str] = set()
        async for chunk in verifier.GetTokenizer(pb.GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S):
            write_file(folder, chunk.name, chunk.data, append=chunk.name in seen)
            seen.add(chunk.name)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
    return Target(info, tokenizer, Vocabulary.of(tokenizer), Grammars(partial(as_json, tokenizer), info.eos_token_ids))
