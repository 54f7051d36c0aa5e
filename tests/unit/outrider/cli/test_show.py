"""What a model writes is shown on a terminal and commands none; elsewhere it is handed on as it is."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from outrider.cli.show import LEGEND, show_text, show_tokens, summary
from outrider.client.sync import Finished, Tokens
from outrider.protocol.speculation import FinishReason, TokenKind
from outrider.protocol.statistics import GenerationStats

EVIL = "a\x1b]0;owned\x07\x1b[2Jb\x9b31m\rc\u202e"


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_escapes(colour: bool, terminal: bool) -> None:
    out = io.StringIO()
    tokens = Tokens(0, EVIL, (1,), (TokenKind.NONE,), (len(EVIL),), ())
    show_tokens(Console(file=out, force_terminal=terminal, color_system=None), tokens, colour=colour)
    if terminal:
        assert out.getvalue() == "a\\x1b]0;owned\\x07\\x1b[2Jb\\x9b31m\\x0dc\\u202e"
    else:
        assert out.getvalue() == EVIL


def test_a_drafters_name_commands_no_terminal() -> None:
    """A drafter chooses it."""
    finished = Finished(FinishReason.LENGTH, "", "", 1, 2, GenerationStats(drafts=1, drafter=EVIL))
    assert "a\\x1b]0;owned\\x07" in summary(finished.stats, finished)
    assert summary(finished.stats, finished).isprintable()


@pytest.mark.parametrize("colour", [False, True])
def test_a_text_is_piped_as_the_target_wrote_it(colour: bool) -> None:
    """Rich takes `:100:` for an emoji, a tab for spaces, and carriage returns and form feeds for nothing."""
    text = "\tprint(s[1:100:2])\r\n\x0c:smile: [b]x[/b]"
    out = io.StringIO()
    show_tokens(Console(file=out), Tokens(0, text, (1,), (TokenKind.PLAIN,), (len(text),)), colour=colour)
    assert out.getvalue() == text
    out = io.StringIO()
    show_text(Console(file=out, force_terminal=True), text)
    assert out.getvalue() == "\tprint(s[1:100:2])\\x0d\n\\x0c:smile: [b]x[/b]"


def test_kinds_are_told_apart_without_colours() -> None:
    """As with NO_COLOR, or by who does not tell red from green."""
    out, kinds = io.StringIO(), (TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS, TokenKind.PLAIN)
    console = Console(file=out, force_terminal=True, color_system="standard", _environ={"NO_COLOR": "1"})
    show_tokens(console, Tokens(0, "abcd", (1, 2, 3, 4), kinds, (1, 1, 1, 1)), colour=True)
    assert out.getvalue() == "a\x1b[4mb\x1b[0m\x1b[1mc\x1b[0m\x1b[2md\x1b[0m"
    console.print(LEGEND, end="")
    assert out.getvalue().endswith("accepted \x1b[4mrecovered\x1b[0m \x1b[1mbonus\x1b[0m \x1b[2mplain\x1b[0m")


def test_colours_change_no_text() -> None:
    """Rich makes of a tab as many spaces as fit where the chunk begins a line."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, color_system="standard", _environ={})
    for text in ("def f():\n", "\treturn 1\t# one, in a line that is longer than the terminal is broad\n", "\tx"):
        kinds = (TokenKind.ACCEPTED, TokenKind.PLAIN)
        show_tokens(console, Tokens(0, text, (1, 2), kinds, (1, len(text) - 1)), colour=True)
    assert "\x1b[32md\x1b[0m\x1b[2mef" in out.getvalue()
    assert re.sub("\x1b\\[[0-9]*m", "", out.getvalue()).splitlines() == [
        "def f():",
        "\treturn 1\t# one, in a line that is longer than the terminal is broad",
        "\tx",
    ]
