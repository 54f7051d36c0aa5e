"""`outrider bench engine`: one engine on this machine, beside transformers and beside what the machine can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.base.config import ENGINES
from outrider.bench.common.report import Times, check_files, needs, write_json
from outrider.bench.engine import results, streams
from outrider.bench.engine.results import Alone, EngineExtent, Served
from outrider.cli import options
from outrider.cli.up import Compile, Dtype, Target, Threads, check_engine
from outrider.launch.stack import LaunchPlan
from outrider.models.hub import DEFAULT, locate
from outrider.protocol.errors import InvalidRequest

_FULL = EngineExtent(
    rounds=40,
    contexts=(256, 1024, 4096),
    new_tokens=(1, 2, 3, 5, 8, 9, 16, 17, 24, 32),
    sessions=(1, 2, 4, 8, 16, 32),
    batch_tokens=32_768,
    prefills=10,
    prompts=10,
)
_QUICK = EngineExtent(
    rounds=12,
    contexts=(256, 1024),
    new_tokens=(1, 2, 5, 9, 17, 32),
    sessions=(1, 2, 8, 32),
    batch_tokens=8_192,
    prefills=3,
    prompts=3,
)
_LEAST_ROUNDS = {False: 20, True: 7}  # by --quick; fewer say nothing on a machine that does other things too


def engine(
    target: Target = DEFAULT,
    device: Annotated[str, options.option("--device", "auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Dtype = "auto",
    quantization: Annotated[str, options.option("--quantization", "none or int8 (weights only, on a CPU).")] = "none",
    engine_name: Annotated[
        str, options.option("--engine", "auto (the fastest that works), native, cuda or transformers.")
    ] = "auto",
    compile_engine: Compile = "",
    threads: Threads = 0,
    rounds: Annotated[
        int | None, options.option("--rounds", "Rounds of every step; 40, or 12 with --quick.", show_default=False)
    ] = None,
    quick: Annotated[bool, options.option("--quick", "Fewer points and rounds: minutes, the same results.")] = False,
    json_file: Annotated[Path | None, options.option("--json", "Write the results to this file.")] = None,
    plot_file: Annotated[Path | None, options.option("--plot", "Draw the curves into this .png file.")] = None,
) -> None:
    """How fast one engine is here: steps by new tokens and by sessions, beside transformers and the machine's limits.

    Then the same model behind the real services: how a long prompt disturbs others, and what a known beginning saves.
    """
    extent = _extent(quick, rounds)
    _check_one_of("--quantization", quantization, ("none", "int8"))
    check_engine(engine_name, compile_engine, tuple(name for name in ENGINES if name != "mock"))
    check_files(json_file, plot_file)
    plan = LaunchPlan(
        target=target,
        drafters=(),
        port=0,
        device=device,
        dtype=dtype,
        quantization=quantization,
        engine=engine_name,
        compile=compile_engine,
        threads=threads,
    )
    console = Console()

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    locate(target, say)  # a wrong name is said at once, not after torch is loaded
    passes = needs("torch", "models", "outrider.bench.engine.forward_passes")
    alone: Alone = passes.measure(plan, extent, say)
    passes.release()
    served = streams.measure(plan, extent, say)
    found = results.summary(alone, served)
    _show(console, alone, served, found)
    if json_file is not None:
        where = {"device": alone.device, "threads": alone.threads, "engine": alone.engine, "weights": alone.weights}
        write_json(json_file, results.rows(alone, served), found, **where)
    if plot_file is not None:
        needs("matplotlib", "bench", "outrider.bench.engine.plot").draw(alone, plot_file)


def _extent(quick: bool, rounds: int | None) -> EngineExtent:
    extent = _QUICK if quick else _FULL
    if rounds is None:
        return extent
    if rounds < _LEAST_ROUNDS[quick]:
        least, shorter = _LEAST_ROUNDS[quick], "" if quick else f", or {_LEAST_ROUNDS[True]} with --quick"
        raise InvalidRequest.of("--rounds", rounds, f"at least {least}{shorter}")
    return replace(extent, rounds=rounds)


def _check_one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidRequest.of(flag, value, f"one of {', '.join(known)}")


def _show(console: Console, alone: Alone, served: Served, found: dict[str, Any]) -> None:
    where = f"{alone.engine} on {alone.device}, {alone.threads} threads"
    console.print(f"\n[bold]{alone.name}[/bold], weights in {alone.weights}, {where}", highlight=False)
    console.print("\nA step of one session by new tokens: best ms (median ms)", highlight=False)
    console.print(_curve("new tokens", alone.verification, _best))
    console.print("A plain step of several sessions: tokens/s of all (best ms)", highlight=False)
    console.print(_curve("sessions", alone.batch, _rate))
    console.print("What follows", highlight=False)
    console.print(_findings(alone, served, found))


def _best(_: int, times: Times) -> str:
    return f"{times.least:.1f} ({times.median:.1f})"


def _rate(sessions: int, times: Times) -> str:
    return f"{1000 * sessions / times.least:.0f} ({times.least:.1f})"


def _curve(name: str, measured: Mapping[tuple[int, int], Times], cell: Callable[[int, Times], str]) -> Table:
    contexts = sorted({context for context, _ in measured})
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(name, justify="right")
    for context in contexts:
        table.add_column(f"context {context:,}", justify="right")
    for count in sorted({count for _, count in measured}):
        cells = (measured.get((context, count)) for context in contexts)
        table.add_row(str(count), *("–" if times is None else cell(count, times) for times in cells))
    return table


def _findings(alone: Alone, served: Served, found: dict[str, Any]) -> Table:
    """Each figure of the summary in words."""
    table = Table("", "", "", box=None, show_header=False, padding=(0, 1))
    lines = (
        ("single_token_vs_eager", "×", f"one token {alone.single.least:.1f} ms, transformers {alone.eager.least:.1f}"),
        ("flatness_9", "×", "a step of 9 new tokens over one"),
        ("flatness_17", "×", "a step of 17 new tokens over one"),
        ("sessions8_vs_1", "×", "tokens/s of 8 sessions over one"),
        ("sessions32_vs_1", "×", "tokens/s of 32 sessions over one"),
        ("prefill_gap_ratio", "×", f"p99 gap {served.during.p99:.0f} ms, undisturbed {served.quiet.median:.0f}"),
        ("prefix_ttft_ratio", "×", f"first token {served.second.median:.0f} ms, unseen {served.first.median:.0f}"),
        ("fraction_of_floor", "", f"reading {found['token_mb']:.0f} MB takes {alone.floor_ms:.1f} ms"),
        ("bandwidth_gb_s", "GB/s", "reading memory"),
        ("matmul_gflop_s", "GFLOP/s", "multiplying large matrices"),
    )
    for key, unit, text in lines:
        table.add_row(key, f"{found[key]:.2f} {unit}".rstrip(), text)
    for when, value in alone.memory_mb.items():
        table.add_row("memory_mb", f"{value:.0f} MB", when.replace("_", " "))
    return table
