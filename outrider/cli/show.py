"""Display of tokens, statistics and results in a terminal."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from outrider.client.sync import Finished, Generation, Tokens
from outrider.protocol.printable import printable
from outrider.protocol.speculation import TokenKind
from outrider.protocol.statistics import GenerationStats

STYLES = {  # told apart without colours, too
    TokenKind.ACCEPTED: "green",
    TokenKind.RECOVERED: "underline red",
    TokenKind.BONUS: "bold cyan",
    TokenKind.PLAIN: "dim",
    TokenKind.NONE: "",
}
LEGEND = Text(" ").join(Text(kind.name.lower(), style) for kind, style in STYLES.items() if style)


def show_tokens(console: Console, tokens: Tokens, *, colour: bool) -> None:
    """Print a chunk of text, with `colour` coloured by kind of token on a terminal."""
    if colour and console.is_terminal:
        console.print(coloured(tokens), end="", soft_wrap=True)
    else:
        show_text(console, tokens.text)


def show_text(console: Console, text: str) -> None:
    """Write text, escaped for a terminal. `Console.print` would replace tabs and `:100:`, and drop returns."""
    console.file.write(printable(text) if console.is_terminal else text)
    console.file.flush()


def coloured(tokens: Tokens) -> Segments:
    """Return a chunk in colours. In a `Text`, tabs would become spaces as if the chunk began a line."""
    parts = zip(tokens.kinds, tokens.characters, accumulate(tokens.characters), strict=True)
    return Segments(
        Segment(printable(tokens.text[end - count : end]), Style.parse(STYLES[kind])) for kind, count, end in parts
    )


def summary(stats: GenerationStats, finished: Finished) -> str:
    """Return one line with the timings of a request and the effect of speculation."""
    line = (
        f"{finished.output_tokens} tokens · {stats.tokens_per_second:.1f} tokens/s · "
        f"first after {stats.time_to_first_token_ms:.0f} ms · {stats.steps} steps"
    )
    if not stats.drafts:
        return f"{line} · plain"
    return (
        f"{line} · {printable(stats.drafter)}: {stats.acceptance_length:.2f} tokens per guessed step, "
        f"{100 * stats.acceptance_rate:.0f} % accepted, mean γ {stats.mean_gamma:.1f}"
    )


def explanation(stats: GenerationStats) -> Table:
    """Return a table of the expected and measured throughput of each speculation plan."""
    table = Table("plan", "steps", "expected tokens/s", "measured", title="γ control", title_justify="left")
    for share in stats.plans:
        table.add_row(
            share.plan,
            str(share.steps) if share.steps else "not taken",
            f"{share.expected_tokens_per_second:.1f}" if share.expected_tokens_per_second else "-",
            f"{share.tokens_per_second:.1f}" if share.steps else "",
        )
    return table


def as_json(generation: Generation) -> dict[str, Any]:
    """Return a generation as JSON values."""
    finished = generation.finished
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "kinds": [kind.name.lower() for kind in generation.kinds],
        "finish_reason": finished.finish_reason.name.lower(),
        "stop": finished.stop,
        "seed": generation.started.seed,
        "session_id": generation.started.session_id,
        "model": generation.started.model,
        "usage": {"prompt_tokens": finished.prompt_tokens, "output_tokens": finished.output_tokens},
        "stats": asdict(finished.stats),
    }
