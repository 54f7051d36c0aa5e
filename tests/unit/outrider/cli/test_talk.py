"""Conversations in a terminal."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import options, talk
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


def test_generate_takes_no_drafter_or_stop_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OUTRIDER_DRAFTER says which drafter `outrider up` starts, and a variable could not hold a stop with a blank."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(talk.options, "connect", lambda _: Coordinator())
    monkeypatch.setattr(talk, "_stream", lambda client, request, **_: sent.append(request))
    monkeypatch.setenv("OUTRIDER_DRAFTER", "auto")
    monkeypatch.setenv("OUTRIDER_STOP", "10 1")
    result = CliRunner().invoke(app, ["generate", "x"])
    assert result.exit_code == 0, result.output
    assert sent[0]["drafter"] == ""
    assert sent[0]["params"].stop == ()


def test_endpoints_may_be_divided_by_commas_and_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(options, "Client", lambda endpoints, **_: given.append(endpoints))
    flags = dict.fromkeys(("api_key", "tls_cert", "tls_key", "tls_ca", "tls_name"), "")
    options.connect(flags | {"endpoint": "a:1, b:2"})
    assert given == [["a:1", "b:2"]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gamma", "-1"], "greater than or equal to 0"),
        (["--gamma", "65"], "less than or equal to 64"),
        (["--branches", "99"], "less than or equal to 8"),
        (["--timeout-s", "0"], "greater than or equal to 0.001"),
        (["--endpoint", "here"], "endpoint is here, must be host:port"),
        (["--endpoint", "127.0.0.1:99999"], "must be host:port"),
        (["--endpoint", "127.0.0.1:1,,"], "failed to connect"),
    ],
)
def test_flags_that_no_request_can_have_are_told_at_once(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hi", *flags])
    assert result.exit_code != 0
    assert said in " ".join(re.sub(r"[│\s]+", " ", result.output + str(result.exception)).split())
