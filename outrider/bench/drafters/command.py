"""`outrider bench drafters`: speed-up by drafter, kind of prompt and mode, compared with other engines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.base.config import option
from outrider.base.processes import end_on_signals
from outrider.bench.common.progress import TurnProgress, turn_progress
from outrider.bench.common.report import Row, check_engine, check_files, import_on_use, write_json
from outrider.bench.drafters import peers, setups
from outrider.bench.drafters.comparison import MODES, OUTRIDER, PLAIN, Comparison
from outrider.bench.drafters.peers import Peer, PeerRecipe, Weights
from outrider.bench.drafters.schedule import DraftersExtent, Schedule, bench_requests
from outrider.bench.drafters.setups import PLAIN_SETUP, DrafterSetup
from outrider.launch.options import Dtype, Engine, Target, Threads
from outrider.launch.stack import LaunchPlan, Stack, on_one_cpu
from outrider.models import GGUF
from outrider.models.drafter_choice import best_drafter, drafter_kinds
from outrider.models.hub import DEFAULT, locate, locate_safetensors
from outrider.protocol.errors import InvalidRequest, OutriderError, StartupError
from outrider.protocol.speculation import MAX_GAMMA

_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # it ends with this process at the latest
_GUESS_TOKENS = 16  # context that vLLM's guesses may need beyond the answer


def drafters(
    target: Target = DEFAULT,
    drafter_list: Annotated[
        str,
        option(
            "--drafters",
            "KIND or KIND:MODEL, separated by commas; A+B is one drafter of both kinds, A&B are two in one session. "
            "Default: those that Outrider ships for the target.",
            show_default=False,
        ),
    ] = "",
    device: Annotated[str, option("--device", "auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    threads: Threads = 0,
    gamma: Annotated[int, option("--gamma", "Fixed γ of the runs that measure acceptance.", min=1, max=MAX_GAMMA)] = 4,
    tokens: Annotated[
        int | None, option("--tokens", "Tokens per answer; 128, or 64 with --quick.", min=2, show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None, option("--prompts", "File with your prompts: one JSON object per line, with kind and prompt.")
    ] = None,
    prompts_per_kind: Annotated[
        int | None,
        option("--prompts-per-kind", "Prompts of each kind; 3, or 1 with --quick.", min=1, show_default=False),
    ] = None,
    rounds: Annotated[
        int | None, option("--rounds", "Repetitions of all answers; 2, or 1 with --quick.", min=1, show_default=False)
    ] = None,
    modes: Annotated[
        str, option("--modes", "Of greedy, coupled and block, separated by commas; other engines answer in greedy.")
    ] = ",".join(MODES),
    early_exit: Annotated[
        int | None,
        option("--early-exit", "Layers that transformers drafts with; default: a third.", min=1, show_default=False),
    ] = None,
    vllm_python: Annotated[
        Path | None, option("--vllm-python", "Python interpreter with vLLM; adds vLLM to the comparison.")
    ] = None,
    vllm_dtype: Annotated[str, option("--vllm-dtype", "vLLM's dtype; default: the target's here.")] = "",
    llama_python: Annotated[
        Path | None,
        option("--llama-python", "Python interpreter with llama-cpp-python; adds llama.cpp, for a GGUF target."),
    ] = None,
    busy: Annotated[int, option("--busy", "Processes that compute without pause beside the benchmark.", min=0)] = 0,
    quick: Annotated[bool, option("--quick", "Fewer and shorter answers: nine minutes.")] = False,
    json_file: Annotated[Path | None, option("--json", "Write the results to this file.")] = None,
    plot_file: Annotated[Path | None, option("--plot", "Draw the results into this .png file.")] = None,
) -> None:
    """Measure speed-up and acceptance of each drafter by kind of prompt, greedy and sampled.

    All candidates answer the same prompts in turn: plain Outrider, each drafter and, in greedy mode, other engines with
    the same weights. The command fails if guesses have changed a text. Ctrl-C and
    SIGTERM end it with the results so far.
    """
    chosen = setups.parse(drafter_list or _shipped_drafters(target))
    for flag, python in (("--vllm-python", vllm_python), ("--llama-python", llama_python)):
        if python is not None and not os.access(python, os.X_OK):
            raise InvalidRequest.of(flag, python, "a Python interpreter")
    check_files(json_file, plot_file)
    check_engine(engine)
    setups.check_kinds(chosen, sorted(drafter_kinds()))
    extent = DraftersExtent.of(quick, prompts_per_kind, rounds, tokens, gamma, modes)
    data = import_on_use("torch", "models", "outrider.train.data")
    texts = data.read_prompts(prompts) if prompts is not None else data.shipped("heldout")
    together = on_one_cpu(device, "auto", engine)
    plan = LaunchPlan(target, together=together, device=device, dtype=dtype, threads=threads, engine=engine)
    end_on_signals()
    with turn_progress() as turns:
        gguf = None if llama_python is None else _gguf_of(target, turns.set_text)

        def others(weights: Weights) -> list[PeerRecipe]:
            recipes = [peers.transformers_recipe(weights, early_exit)]
            recipes += peers.vllm_recipes(weights, vllm_python, vllm_dtype) if vllm_python is not None else []
            return recipes + (peers.llama_recipes(weights, llama_python, gguf) if llama_python and gguf else [])

        comparison, where = _measure(plan, chosen, texts, extent, others, busy, turns)
    _report(comparison, chosen, where | {"busy_processes": busy}, json_file, plot_file)


def _gguf_of(name: str, progress: Callable[[str], None]) -> Path:
    """Return a target's GGUF file."""
    found = locate(name, progress)
    if not isinstance(found, Path) or not (found / GGUF).exists():
        raise StartupError(f"{name} has no GGUF file", field="target", value=name, limit="a .gguf file")
    return (found / GGUF).resolve()


def _shipped_drafters(target: str) -> str:
    """Return the drafters that need only the target: the best one, and the kinds that it combines."""
    best = best_drafter(target)
    return ",".join(dict.fromkeys(("ngram", *best.split("+"), best)))


def _measure(
    plan: LaunchPlan,
    chosen: Sequence[DrafterSetup],
    texts: Sequence[Any],
    extent: DraftersExtent,
    peer_recipes: Callable[[Weights], list[PeerRecipe]],
    busy: int,
    turns: TurnProgress,
) -> tuple[Comparison, dict[str, Any]]:
    model = str(locate_safetensors(plan.target, turns.set_text))

    def show_starting(running: Stack) -> None:
        waiting = [f"{child.name} {child.state}" for child in running.children if not child.ready.is_set()]
        turns.set_text(", ".join(waiting) or "registering workers")

    with ExitStack() as exits:
        clients = exits.enter_context(setups.start_setups(plan, (PLAIN_SETUP, *chosen), show_starting))
        info = clients[PLAIN].model()
        requests = bench_requests(_encoded(model, texts), extent, info.context_length)
        longest = max(len(request.prompt) for request in requests) + extent.tokens + _GUESS_TOKENS
        weights = Weights(
            model=model,
            dtype=info.dtype,
            device=info.device,
            threads=plan.threads,
            context=min(longest, info.context_length),
            eos=info.eos_token_ids,
        )
        recipes = peer_recipes(weights)
        turns.set_text(f"starting {', '.join(recipe.engine for recipe in recipes)}")
        others = exits.enter_context(peers.peers(recipes, weights))
        schedule = Schedule(clients, others, extent.gamma)
        turns.set_text("warming up")
        schedule.warm_up(requests[0])
        for _ in range(busy):
            exits.callback(subprocess.Popen([sys.executable, "-P", "-c", _BUSY, str(os.getpid())]).kill)
        runs = schedule.run(requests, turns)
    where = {"target": info.name, "weights": info.dtype, "device": info.device, "threads": plan.threads or "auto"}
    failed = {"failed": schedule.failure} if schedule.failure else {}
    return Comparison(runs), where | _versions(others) | failed


def _encoded(model: str, texts: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """Tokenise the prompts once for all engines."""
    tokenizer = import_on_use("transformers", "models", "transformers").AutoTokenizer.from_pretrained(model)
    encode = import_on_use("torch", "models", "outrider.train.data").encode
    return [(text.kind, encode(tokenizer, text.text)) for text in texts]


def _versions(others: Sequence[Peer]) -> dict[str, Any]:
    versions: dict[str, Any] = {}
    for peer in others:
        versions |= {peer.recipe.engine: peer.about["version"]}
        if "early_exit" in peer.about:
            versions["early_exit_layers"] = peer.about["early_exit"]
    return versions


def _report(
    comparison: Comparison,
    chosen: Sequence[DrafterSetup],
    where: dict[str, Any],
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    rows, summary = comparison.rows(), comparison.summary()
    _show(Console(), rows, comparison.kinds, summary)
    if json_file is not None:
        write_json(json_file, rows, summary, **where)
    if plot_file is not None:
        import_on_use("matplotlib", "bench", "outrider.bench.drafters.plot").draw(
            rows, comparison.kinds, [setup.name for setup in chosen], where, plot_file
        )
    if "failed" in where:
        raise OutriderError(where["failed"])
    changed = [each for each in summary["differences"] if each["engine"] == OUTRIDER]
    if changed:
        first = changed[0]
        raise OutriderError(
            f"{first['drafter']} has changed {len(changed)} texts, first prompt {first['prompt']} ({first['kind']}, "
            f"{first['mode']}) at token {first['first_different_token']}: this is a bug, please report it"
        )


def _show(console: Console, rows: Sequence[Row], kinds: Sequence[str], summary: dict[str, Any]) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        shown = [row for row in rows if row["mode"] == mode]
        console.print(f"\n[bold]{mode}[/bold]: speed-up over plain (tokens per verdict with guesses)", highlight=False)
        console.print(_table(shown, kinds))
    console.print(f"fastest drafter over all kinds: [bold]{summary['drafter']}[/bold]", highlight=False)
    for row in rows:
        if "error" in row:
            console.out(f"{row['engine']} {row['drafter']}, {row['kind']}: {row['error']}", style="yellow")
    for each in summary["differences"]:
        console.print(
            f"{each['engine']} {each['drafter']}: text differs from plain Outrider: {each['kind']}, "
            f"{each['mode']}, prompt {each['prompt']}, from token {each['first_different_token']}",
            style="red",
        )


def _table(rows: Sequence[Row], kinds: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row["engine"], row["drafter"]), {})[row["kind"]] = _cell(row)
    for (engine, drafter), by_kind in cells.items():
        name = drafter if engine == OUTRIDER else f"{engine} {drafter}"
        table.add_row(name, *(by_kind.get(kind, "–") for kind in kinds))
    return table


def _cell(row: Row) -> str:
    if row["drafter"] == PLAIN and row["tokens_per_s"] is not None:
        return f"{row['tokens_per_s']:.1f}/s"
    if row["speedup_vs_plain"] is None:
        return "–"
    length = row.get("acceptance_length")
    return f"{row['speedup_vs_plain']:.2f} ×" + (f" ({length:.2f})" if length is not None else "")
