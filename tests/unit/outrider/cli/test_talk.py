"""Conversations in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from outrider.cli import options, talk
from outrider.cli.app import app
from outrider.client.sync import Finished
from outrider.protocol.errors import InvalidRequest, Unavailable
from outrider.protocol.speculation import FinishReason
from outrider.protocol.statistics import GenerationStats
from tests.cluster import free_port


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

    def read() -> str | None:
        return next(lines, None)

    monkeypatch.setattr(talk.options, "connect", lambda _: there)
    monkeypatch.setattr(talk, "_stream", stream)
    monkeypatch.setattr(talk, "_read_line", read)
    result = CliRunner().invoke(app, ["chat"])
    assert result.exit_code == 0, result.output
    assert "the verifier is full" in result.output
    assert there.asked[2] == [("user", "one"), ("assistant", "Yes."), ("user", "three")]


def test_the_name_of_a_drafter_is_no_mark_of_rich(capsys: pytest.CaptureFixture[str]) -> None:
    """A drafter chooses it: as a mark it could show a link to anywhere."""
    stats = GenerationStats(drafts=1, drafter="[link=http://evil]suffix[/link]")
    client = MagicMock()
    client.generate.return_value = [Finished("text", FinishReason.LENGTH, "", 1, 2, stats)]
    assert talk._stream(client, {}, colour=False) == "text"
    assert stats.drafter in "".join(capsys.readouterr().err.splitlines())


CHAT = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from outrider.cli import talk
from types import SimpleNamespace
from unittest.mock import MagicMock
client = MagicMock()
client.__enter__.return_value.model.return_value = SimpleNamespace(name="toy")
talk.options.connect = lambda _: client
talk._stream = lambda client, request, **_: print(ascii(request["chat"][-1][1])) or "Yes."
from outrider.cli.app import app
app(["chat"])
"""


@pytest.mark.parametrize(
    ("typed", "asked"),
    [(b"And\x1b[D\x1b[Dx\n", "'Axnd'"), (b"word " * 1500 + b"END\n", "word END'")],
    ids=["arrows", "long"],
)
def test_a_line_typed_in_a_terminal_arrives_whole(typed: bytes, asked: str) -> None:
    """Without readline a terminal kept 4095 bytes of a line and passed the arrow keys on."""
    ours, theirs = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-c", CHAT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        _read_until(ours, "you> ")
        for i in range(0, len(typed), 256):
            os.write(ours, typed[i : i + 256])
        assert asked in _read_until(ours, asked)
        os.write(ours, b"/exit\n")
        _read_until(ours)
        assert chat.wait(20) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)


@pytest.mark.parametrize(("end", "line"), [(KeyboardInterrupt, ""), (EOFError, None)])
def test_ctrl_c_before_a_line_ends_no_conversation(
    end: type[BaseException], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: str) -> str:
        raise end

    monkeypatch.setattr("builtins.input", read)
    assert talk._read_line() == line


def _read_until(terminal: int, *ends: str) -> str:
    """Return what a terminal shows, up to one of `ends` or its end."""
    shown = ""
    while not any(end in shown for end in ends) and select.select([terminal], [], [], 20)[0]:
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # closed by its process
            break
    return shown


def test_generate_takes_no_drafter_model_or_stop_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OUTRIDER_DRAFTER says which drafter `outrider up` starts, OUTRIDER_MODEL which model a drafter runs.

    A variable could not hold a stop with a blank.
    """
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(talk.options, "connect", lambda _: Coordinator())
    monkeypatch.setattr(talk, "_stream", lambda client, request, **_: sent.append(request))
    monkeypatch.setenv("OUTRIDER_DRAFTER", "auto")
    monkeypatch.setenv("OUTRIDER_MODEL", "./Small")
    monkeypatch.setenv("OUTRIDER_STOP", "10 1")
    result = CliRunner().invoke(app, ["generate", "x"])
    assert result.exit_code == 0, result.output
    assert (sent[0]["drafter"], sent[0]["model"]) == ("", "")
    assert sent[0]["params"].stop == ()


def test_a_system_message_from_the_environment_is_for_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(talk.options, "connect", lambda _: Coordinator())
    monkeypatch.setattr(talk, "_stream", lambda client, request, **_: sent.append(request))
    monkeypatch.setenv("OUTRIDER_SYSTEM", "Be brief.")
    for flags in ([], ["--chat"]):
        assert CliRunner().invoke(app, ["generate", "x", *flags]).exit_code == 0
    assert [each.get("prompt") or each["chat"] for each in sent] == ["x", [("system", "Be brief."), ("user", "x")]]
    refused = CliRunner().invoke(app, ["generate", "x", "--system", "Be brief."]).exception
    assert isinstance(refused, InvalidRequest)


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


def test_a_closed_standard_input_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `<&-` closes it. Both commands ended with a traceback."""
    script = "from outrider.cli import main; main()"
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", script, "generate", "-", "--endpoint"]
    done = subprocess.run([*command, f"127.0.0.1:{free_port()}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("outrider: unavailable: failed to connect"), done.stderr
    monkeypatch.setattr(sys, "stdin", None)
    assert talk._read_line() is None


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_that_is_interrupted_in_a_terminal_is_no_success(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop of a shell went on with the next prompt. A conversation goes on."""
    there = MagicMock()
    there.__enter__.return_value.generate.side_effect = KeyboardInterrupt
    lines = iter(["one", "two"])
    monkeypatch.setattr(talk.options, "connect", lambda _: there)
    monkeypatch.setattr(talk, "_read_line", lambda: next(lines, None))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(SystemExit) as ended:
        app([command, "x"] if command == "generate" else [command])
    assert ended.value.code == (130 if command == "generate" else 0)
    assert next(lines, None) is None or command == "generate"
