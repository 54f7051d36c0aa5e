"""Report of a run as a self-contained HTML file.

From the shell: `python -m loadtest.report.page < summary.json > report.html`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from pydantic import ValidationError

from loadtest.report.plots import Plot, plots
from loadtest.report.summary import Counts, Percentiles, Summary

_STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --card: #f6f7f9; --ink: #16191d; --soft: #5a6472; --line: #d9dee5; --band: #eef2f7;
  --one: #1f6feb; --two: #d9730d; --three: #8a4fbf; --good: #1a7f45; --warn: #b26a00; --bad: #c62a2f; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12151a; --card: #1b2027; --ink: #e8ebef; --soft: #a2acb9; --line: #343c47; --band: #1d232b;
  --one: #6ea8ff; --two: #f0a35c; --three: #c49bec; --good: #5fce8d; --warn: #e8b04b; --bad: #ff7b7b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p { margin: .3rem 0; } .soft, dt, th, figcaption, footer { color: var(--soft); }
.verdict { margin: 1rem 0; padding: .6rem .9rem; border-left: .3rem solid; border-radius: .2rem;
  background: var(--card); overflow-wrap: anywhere; }
.good { border-color: var(--good); } .bad { border-color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .6rem; margin: 0; padding: 0; }
.tiles div { background: var(--card); border-radius: .4rem; padding: .6rem .8rem; }
.tiles dt { font-size: .85rem; } .tiles dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.tiles small { font-size: .8rem; color: var(--soft); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; min-width: 0; } svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-family: inherit !important; }
figcaption { display: flex; flex-wrap: wrap; gap: .2rem 1rem; justify-content: space-between; font-size: .9rem; }
figcaption b { color: var(--ink); font-weight: 600; }
.key::before { content: ""; display: inline-block; width: .9em; height: .2em; margin-right: .35em;
  vertical-align: middle; background: var(--of); }
.key { margin-left: .7rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { padding: .35rem .45rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums;
  border-bottom: 1px solid var(--line); }
th { font-weight: 500; } th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); }
th.group { text-align: center; border-left: 1px solid var(--line); } td.group, th.first { border-left:
  1px solid var(--line); }
tr.sum td { font-weight: 600; } .n-bad { color: var(--bad); } .n-warn { color: var(--warn); }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; font-size: .9rem; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no external resources
_NOTES = """
First token: from sending a request to its first output. Inter-token: time between two arrivals of output, per token of
the second. HTTP responses do not contain the number of tokens per arrival: the output's tokens are distributed by
characters. Whole answer: time of successful requests. Percentiles are exact to 1 %. Tokens per second counts the tokens
of correct outputs on arrival; for a part, while all of its users were running. Shed: refused for lack of capacity
before any output, and retried after the time that the server stated; neither a failure nor part of any time above.
Compared: texts compared with the reference that the fleet generated without load.
"""
_TIMES = ("First token", "Inter-token", "Whole answer")


def page(summary: Summary) -> str:
    verdict = summary.verdict
    shape = str(summary.load["shape"])
    body = [
        f"<header><h1>Outrider under load: {escape(shape)}</h1>",
        f'<p class="soft">{escape(summary.target)} · {escape(summary.began)} · Outrider {escape(summary.version)}</p>',
        f'<p class="verdict {"bad" if verdict else "good"}">{_sentence(summary)}</p></header>',
        _tiles(summary),
        _curves(plots(summary)),
        _parts(summary),
        _sorts(summary),
        _errors(summary),
        _facts(summary),
        f"<footer><p>{escape(' '.join(_NOTES.split()))}</p></footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Outrider under load: {escape(shape)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def ms(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _sentence(summary: Summary) -> str:
    if summary.verdict:
        return f"<b>✗ Failed.</b> {escape(summary.verdict)}"
    recovery = "" if summary.recovery is None else f" Throughput at the end: {summary.recovery:.0%} of the start."
    return (
        f"<b>✓ Passed.</b> {summary.all.compared:,} texts equal the reference generated without load; no request "
        f"failed.{recovery}"
    )


def _tiles(summary: Summary) -> str:
    counts = summary.all
    tiles = [
        ("Tokens/s", f"{summary.tokens_per_s:,.1f}", f"in {summary.seconds:.0f} s"),
        ("First token", ms(counts.first_token_ms.p50), f"p95 {ms(counts.first_token_ms.p95)}"),
        ("Inter-token", ms(counts.inter_token_ms.p50), f"p95 {ms(counts.inter_token_ms.p95)}"),
        ("Requests", f"{counts.requests:,}", f"{counts.tokens:,} tokens"),
        ("Texts compared", f"{counts.compared:,}", f"{summary.different_texts:,} differ"),
        ("Failed", f"{counts.failures:,}", ""),
        ("Shed", f"{counts.shed:,}", "refused, retried"),
    ]
    if counts.acceptance_length is not None:
        tiles.append(("Tokens per step", f"{counts.acceptance_length:.2f}", f"{counts.accepted:,} guesses accepted"))
    if summary.recovery is not None:
        tiles.append(("Recovery", f"{summary.recovery:.0%}", "last over first"))
    made = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><small>{note}</small></div>" for name, value, note in tiles)
    return f'<dl class="tiles">{made}</dl>'


def _curves(drawn: Iterable[Plot]) -> str:
    figures = []
    for plot in drawn:
        keys = "".join(
            f'<span class="key" style="--of: var(--{colour})">{name}</span>' for name, colour in plot.legend.items()
        )
        svg = plot.svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)} over time"', 1)
        figures.append(f"<figure><figcaption><b>{escape(plot.title)}</b><span>{keys}</span></figcaption>{svg}</figure>")
    return f'<h2>Over time</h2><div class="curves">{"".join(figures)}</div>'


def _parts(summary: Summary) -> str:
    rows = [
        [
            escape(part.name),
            f"{part.users:,}",
            f"{part.seconds:.1f}",
            f"{part.tokens_per_s:,.1f}",
            *_counted(part),
            *_times(part),
        ]
        for part in summary.parts
    ]
    return "<h2>Parts of the run</h2>" + _table(["Part", "Users", "Seconds", "Tokens/s"], rows)


def _sorts(summary: Summary) -> str:
    rows: list[list[str]] = []
    sums: set[int] = set()
    for sort in summary.sorts:
        if not sort.kind:
            sums.add(len(rows))
        rows.append(
            [
                escape(sort.protocol),
                escape(sort.kind) or "all",
                f"{sort.compared:,}",
                f"{sort.tokens:,}",
                *_counted(sort),
                *_times(sort),
            ]
        )
    if len({sort.protocol for sort in summary.sorts}) > 1:
        sums.add(len(rows))
        both = summary.all
        rows.append(["both", "all", f"{both.compared:,}", f"{both.tokens:,}", *_counted(both), *_times(both)])
    return "<h2>By protocol and kind of prompt</h2>" + _table(["Protocol", "Prompts", "Compared", "Tokens"], rows, sums)


def _errors(summary: Summary) -> str:
    if not summary.errors:
        return ""
    rows = "".join(
        f'<tr><td>{escape(error)}</td><td class="n-bad">{count:,}</td></tr>'
        for error, count in sorted(summary.errors.items(), key=lambda item: -item[1])
    )
    return f'<h2>Failures</h2><div class="wide"><table><tr><th>Failure</th><th>Count</th></tr>{rows}</table></div>'


def _facts(summary: Summary) -> str:
    load = {name: value for name, value in summary.load.items() if value not in ("", None)}
    facts = {"endpoints": ", ".join(summary.endpoints)} | {name.replace("_", " "): f"{v}" for name, v in load.items()}
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<h2>The load</h2><dl class="facts">{listed}</dl>'


def _counted(counts: Counts) -> list[str]:
    return [f"{counts.requests:,}", _marked(counts.failures, "bad"), _marked(counts.shed, "warn")]


def _marked(count: int, how: str) -> str:
    return f'<span class="n-{how}">{count:,}</span>' if count else "0"


def _times(counts: Counts) -> list[str]:
    of: tuple[Percentiles, ...] = (counts.first_token_ms, counts.inter_token_ms, counts.total_ms)
    return [ms(value) for times in of for value in (times.p50, times.p95, times.p99)]


def _table(first: Sequence[str], rows: Sequence[Sequence[str]], sums: Iterable[int] = ()) -> str:
    """Return a table with its own columns first, then the counts and times of every table."""
    names = [*first, "Requests", "Failed", "Shed"]
    sums = set(sums)
    groups = "".join(f'<th class="group" colspan="3">{name}</th>' for name in _TIMES)
    head = "".join(f"<th>{name}</th>" for name in names)
    head += "".join(
        f'<th class="first">{p}</th>' if p == "p50" else f"<th>{p}</th>" for _ in _TIMES for p in ("p50", "p95", "p99")
    )
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td class="group">{cell}</td>' if at >= len(names) and (at - len(names)) % 3 == 0 else f"<td>{cell}</td>"
            for at, cell in enumerate(row)
        )
        body += f'<tr class="sum">{cells}</tr>' if number in sums else f"<tr>{cells}</tr>"
    return (
        f'<div class="wide"><table><tr><th colspan="{len(names)}"></th>{groups}</tr><tr>{head}</tr>{body}</table></div>'
    )


def write(summary: Summary, file: Path) -> None:
    file.write_text(page(summary), encoding="utf-8")


if __name__ == "__main__":
    try:
        given = Summary.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "as a whole"
        sys.exit(f"standard input is not the summary.json of a run: {place}: {first['msg']}")
    sys.stdout.write(page(given))
