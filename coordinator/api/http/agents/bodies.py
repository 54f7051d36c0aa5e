"""Request bodies of chats, and of the conversion between texts and tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coordinator.api.http.bodies import Body, ChatOptions, TokenId
from coordinator.workers.chat_template import Chat
from outrider.protocol.field_limits import LONGEST

MAX_MESSAGES = 1_000
MAX_PARTS = 1_000
_ROLES = {"developer": "system"}


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    name: str | None = Field(None, max_length=LONGEST["name"], description="Ignored: chat templates have no names.")
    # Fields of OpenAI's answers, so that an answer can be sent back unchanged.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatFields(Body):
    """Messages of a chat, and how they become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool = Field(True, description="The prompt ends where the assistant's answer begins.")
    continue_final_message: bool = Field(
        False, description="The answer continues the last message; needs add_generation_prompt: false."
    )

    @model_validator(mode="after")
    def _one_end(self) -> ChatFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    @property
    def chat(self) -> Chat:
        messages = [{"role": _ROLES.get(each.role, each.role), "content": each.text} for each in self.messages]
        return Chat(messages, (), self.add_generation_prompt, self.continue_final_message)


class ChatBody(ChatFields, ChatOptions):
    """`POST /v1/chat/completions`."""

    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Not supported: only empty.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="Ignored: there are no tools.")
    parallel_tool_calls: bool | None = Field(None, description="Ignored: there are no tools.")


class _TextTokensBody(Body):
    model: str | None = Field(None, max_length=LONGEST["model"])
    return_token_strs: bool | None = Field(None, description="Also return each token as the vocabulary writes it.")


class TokenizeTextBody(_TextTokensBody):
    """`POST /tokenize` of a text."""

    prompt: str
    add_special_tokens: bool = Field(True, description="Add what the tokenizer adds to every text.")


class TokenizeChatBody(ChatFields, _TextTokensBody):
    """`POST /tokenize` of a chat."""

    add_special_tokens: Literal[False] = Field(False, description="Chat templates write special tokens themselves.")


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = Field(None, max_length=LONGEST["model"])
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
