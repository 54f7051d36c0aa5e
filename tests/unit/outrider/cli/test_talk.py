"""Conversations in a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import talk
from outrider.cli.app import app
from outrider.protocol.errors import Unavailable


class Coordinator:
    """Fails once, then answers; says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no connection."""

    def model(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="toy")


def test_an_error_ends_an_answer_and_not_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    there, lines = Coordinator(), iter(["one", "two", "three"])

    def stream(client: Coordinator, request: dict[str, Any], *, colour: bool) -> str:
        client.asked.append(list(request["chat"]))
        if len(client.asked) == 2:
            raise Unavailable("the verifier is full")
        return "Yes."

    def read(_: object) -> str | None:
        return next(lines, None)

    monkeypatch.setattr(talk.options, "connect", lambda _: there)
    monkeypatch.setattr(talk, "_stream", stream)
    monkeypatch.setattr(talk, "_read_line", read)
    result = CliRunner().invoke(app, ["chat"])
    assert result.exit_code == 0, result.output
    assert "the verifier is full" in result.output
    assert there.asked[2] == [("user", "one"), ("assistant", "Yes."), ("user", "three")]
