"""`outrider train`: make a drafter for a target."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer import Argument

from outrider.cli.options import option
from outrider.models.hub import DEFAULT

if TYPE_CHECKING:
    from outrider.train import data, loop
    from outrider.train.artifacts.card import Card


def train(
    method: Annotated[str, Argument(help="What to make: eagle, medusa, early-exit or distill.")],
    out: Annotated[Path, option("--out", "Folder for the drafter; a run that was cut off goes on there.")],
    target: Annotated[str, option("--target", "Whom it drafts for: a directory, a .gguf file, a hub id.")] = DEFAULT,
    prompts: Annotated[
        Path | None,
        option("--prompts", "JSON lines with `prompt`: what users ask. Default: the list that comes along."),
    ] = None,
    examples: Annotated[int, option("--examples", "Texts the target writes; 0: one per prompt.", min=0)] = 0,
    max_tokens: Annotated[int, option("--max-tokens", "Longest text it writes.", min=8)] = 160,
    tokens: Annotated[
        int, option("--tokens", "Tokens to learn from, each time one is seen again counted again.", min=1)
    ] = 5_000_000,
    vocabulary: Annotated[int, option("--vocabulary", "Ids that are drafted: the most frequent ones.", min=16)] = 8192,
    layers: Annotated[int, option("--layers", "Decoder layers that are trained; medusa has none.", min=1)] = 1,
    heads: Annotated[int, option("--heads", "Heads of a medusa: tokens ahead.", min=1, max=16)] = 4,
    exit_layers: Annotated[
        int, option("--exit-layers", "First layers of the target that an early exit keeps.", min=1)
    ] = 4,
    hidden: Annotated[int, option("--hidden", "Width of a distilled model.", min=32)] = 192,
    unroll: Annotated[int, option("--unroll", "Steps ahead that an eagle learns together.", min=1, max=8)] = 3,
    learning_rate: Annotated[float, option("--learning-rate", "At its highest.", min=1e-7, max=1.0)] = 1e-3,
    seed: Annotated[int, option("--seed", "Same seed, same data and same order.", min=0)] = 0,
    device: Annotated[str, option("--device", "auto, cpu or cuda:N.")] = "auto",
    data_folder: Annotated[
        Path | None, option("--data", "Where the target's texts are kept. Default: training/data in OUTRIDER_HOME.")
    ] = None,
    restart: Annotated[bool, option("--restart", "Begin anew, whatever lies in the folder.")] = False,
) -> None:
    """Make a drafter for a target, out of what the target itself writes.

    The target answers a list of prompts, once; its texts and hidden states are kept for the next training. Held-out
    prompts tell how many guesses would hold. A run that is stopped goes on when the same command is given again.
    """
    from outrider.train.run import TrainingOrder, train  # torch and transformers: seconds

    order = TrainingOrder(
        method=method,
        target=target,
        out=out,
        prompts=prompts,
        num_examples=examples,
        max_tokens=max_tokens,
        learn_tokens=tokens,
        num_ids=vocabulary,
        layers=layers,
        heads=heads,
        exit_layers=exit_layers,
        hidden=hidden,
        unroll=unroll,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
        restart=restart,
        command=shlex.join(["outrider", *sys.argv[1:]]),
        **({} if data_folder is None else {"data_home": data_folder}),
    )
    with _Shown() as shown:
        card = train(order, shown)
    _tell(out, card, target)


_KINDS = {"distill": "model"}


class _Shown:
    """The training's progress on the terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}
        self._looked: dict[str, Any] | None = None

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_status(self, text: str) -> None:
        self._progress.console.print(text, style="dim")

    def on_data(self, what: str, progress: data.DataProgress) -> None:
        task = self._task(what, progress.total)
        self._progress.update(task, completed=progress.done, description=f"texts {what}")

    def on_step(self, report: loop.Report) -> None:
        task = self._task("learning", report.total)
        self._progress.update(
            task, completed=min(report.tokens, report.total), description=f"learning, loss {report.loss:.3f}"
        )
        if report.held_out is not self._looked:
            self._looked = report.held_out
            every = report.held_out["all"]
            rates = " ".join(f"{rate:.2f}" for rate in every["acceptance"])
            self._progress.console.print(
                f"after {report.measured_at:,} tokens: held-out acceptance {rates}, "
                f"length {every['acceptance_length']:.2f}"
            )

    def _task(self, name: str, total: int) -> Any:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        return self._tasks[name]


def _tell(out: Path, card: Card, target: str) -> None:
    console = Console()
    table = Table("held-out prompts", "guess 1", "2", "3", "4", "tokens per step")
    for kind, found in card.metrics.items():
        rates = [f"{rate:.2f}" for rate in found["acceptance"]]
        table.add_row(kind, *rates, f"{found['acceptance_length']:.2f}")
    console.print(table)
    named = "" if target == DEFAULT else f"--target {target} "
    kind = _KINDS.get(card.method, card.method)
    console.print(f"{out} is ready: outrider up {named}--drafter {kind}:{out}", soft_wrap=True)
