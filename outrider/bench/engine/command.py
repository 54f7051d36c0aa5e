"""`outrider bench engine`: one engine on this machine, compared with transformers and with the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.base.config import option
from outrider.bench.common.report import ENGINES, Times, check_engine, check_files, import_on_use, write_json
from outrider.bench.engine import results, streams
from outrider.bench.engine.results import EngineExtent, PassTimes, ServedTimes
from outrider.launch.options import Dtype, Target, Threads
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
_SERVED_AS = {"NativeEngine": "native", "CudaGraphEngine": "cuda", "TransformersEngine": "transformers"}
_LEAST_ROUNDS = {False: 20, True: 7}  # by --quick; minima of fewer rounds are noise on a shared machine


def engine(
    target: Target = DEFAULT,
    device: Annotated[str, option("--device", "auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Dtype = "auto",
    quantization: Annotated[str, option("--quantization", "none or int8 (weights only, on a CPU).")] = "none",
    engine_name: Annotated[str, option("--engine", "auto (the fastest), native, cuda or transformers.")] = "auto",
    threads: Threads = 0,
    rounds: Annotated[
        int | None, option("--rounds", "Rounds of every step; 40, or 12 with --quick.", show_default=False)
    ] = None,
    quick: Annotated[bool, option("--quick", "Fewer points and rounds: three minutes, the same keys.")] = False,
    json_file: Annotated[Path | None, option("--json", "Write the results to this file.")] = None,
    plot_file: Annotated[Path | None, option("--plot", "Draw the curves into this .png file.")] = None,
) -> None:
    """Measure one engine: steps by new tokens and by sessions, compared with transformers and the machine's limits.

    Then measure the model behind the real services: gaps in streams during a long prefill, and the time to the first
    token with a cached prefix.
    """
    extent = _extent(quick, rounds)
    if quantization not in ("none", "int8"):
        raise InvalidRequest.of("--quantization", quantization, "one of none, int8")
    check_engine(engine_name, tuple(name for name in ENGINES if name not in ("vllm", "mock")))
    check_files(json_file, plot_file)
    plan = LaunchPlan(
        target=target,
        drafters=(),
        port=0,
        device=device,
        dtype=dtype,
        quantization=quantization,
        engine=engine_name,
        threads=threads,
    )
    console = Console()

    def notify(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    locate(target, notify)  # a wrong name fails before torch is loaded
    forward_passes = import_on_use("torch", "models", "outrider.bench.engine.forward_passes")
    passes: PassTimes = forward_passes.measure(plan, extent, notify)
    forward_passes.release()
    served = streams.measure(replace(plan, engine=_SERVED_AS[passes.engine]), extent, notify)  # `auto` may be vLLM
    summary = results.summary(passes, served)
    _show(console, passes, served, summary)
    if json_file is not None:
        where = {"device": passes.device, "threads": passes.threads, "engine": passes.engine, "weights": passes.weights}
        write_json(json_file, results.rows(passes, served), summary, **where)
    if plot_file is not None:
        import_on_use("matplotlib", "bench", "outrider.bench.engine.plot").draw(passes, plot_file)


def _extent(quick: bool, rounds: int | None) -> EngineExtent:
    extent = _QUICK if quick else _FULL
    if rounds is None:
        return extent
    if rounds < _LEAST_ROUNDS[quick]:
        least, shorter = _LEAST_ROUNDS[quick], "" if quick else f", or {_LEAST_ROUNDS[True]} with --quick"
        raise InvalidRequest.of("--rounds", rounds, f"at least {least}{shorter}")
    return replace(extent, rounds=rounds)


def _show(console: Console, passes: PassTimes, served: ServedTimes, summary: dict[str, Any]) -> None:
    where = f"{passes.engine} on {passes.device}, {passes.threads} threads"
    console.print(f"\n[bold]{passes.name}[/bold], weights in {passes.weights}, {where}", highlight=False)
    console.print("\nA step of one session by new tokens: best ms (median ms)", highlight=False)
    console.print(_curve("new tokens", passes.verification, lambda _, times: f"{times.best:.1f} ({times.median:.1f})"))
    console.print("A plain step of several sessions: tokens/s in total (best ms)", highlight=False)
    console.print(_curve("sessions", passes.batch, lambda n, times: f"{1000 * n / times.best:.0f} ({times.best:.1f})"))
    console.print("Summary", highlight=False)
    console.print(_summary_table(passes, served, summary))


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


def _summary_table(passes: PassTimes, served: ServedTimes, summary: dict[str, Any]) -> Table:
    """Return the summary with an explanation of each figure."""
    table = Table("", "", "", box=None, show_header=False, padding=(0, 1))
    lines = (
        ("single_token_vs_eager", "×", f"one token {passes.single.best:.1f} ms, transformers {passes.eager.best:.1f}"),
        ("flatness_9", "×", "a step of 9 new tokens over one"),
        ("flatness_17", "×", "a step of 17 new tokens over one"),
        ("sessions8_vs_1", "×", "tokens/s of 8 sessions over one"),
        ("sessions32_vs_1", "×", "tokens/s of 32 sessions over one"),
        ("prefill_gap_ratio", "×", f"p99 gap {served.during.p99:.0f} ms, undisturbed {served.quiet.median:.0f}"),
        ("prefix_ttft_ratio", "×", f"first token {served.second.median:.0f} ms, uncached {served.first.median:.0f}"),
        ("fraction_of_floor", "", f"reading {summary['token_mb']:.0f} MB takes {passes.floor_ms:.1f} ms"),
        ("bandwidth_gb_s", "GB/s", "reading memory"),
        ("matmul_gflop_s", "GFLOP/s", "multiplying large matrices"),
    )
    for key, unit, text in lines:
        table.add_row(key, f"{summary[key]:.2f} {unit}".rstrip(), text)
    for when, value in passes.memory_mb.items():
        table.add_row("memory_mb", f"{value:.0f} MB", when.replace("_", " "))
    return table
