"""Calls to workers that are not there."""

from __future__ import annotations

from typing import Generic, TypeVar

from google.protobuf.message import Message

Request = TypeVar("Request", bound=Message)


class Sent(Generic[Request]):
    """A call that keeps what is sent, and gives these replies."""

    def __init__(self, kind: type[Request]) -> None:
        self._kind = kind
        self.messages: list[Request] = []
        self.replies: list[bytes] = []

    def send(self, message: bytes) -> bool:
        self.messages.append(self._kind.FromString(message))
        return True

    async def read(self) -> bytes | None:
        return self.replies.pop(0) if self.replies else None
