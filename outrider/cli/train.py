"""`outrider train`: train a drafter for a target."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Context

from outrider.base.config import check_installed, option
from outrider.models.drafter_choice import SERVED_AS
from outrider.models.hub import DEFAULT
from outrider.protocol.fieldwise import from_plain

if TYPE_CHECKING:
    from outrider.train import data, loop
    from outrider.train.artifacts.card import Card


def train(
    context: Context,
    method: Annotated[str, Argument(help="Method: eagle, eagle3, dspark, medusa, early-exit or distill.")],
    out: Annotated[Path, option("--out", "Folder of the drafter; an interrupted run continues there.")],
    target: Annotated[str, option("--target", "Target model: a directory, a .gguf file, a hub id.")] = DEFAULT,
    prompts: Annotated[Path | None, option("--prompts", "JSON lines with `prompt`. Default: included ones.")] = None,
    num_examples: Annotated[int, option("--examples", "Texts of the target to learn; 0: one per prompt.", min=0)] = 0,
    max_tokens: Annotated[int, option("--max-tokens", "Maximum length of a generated text.", min=8)] = 160,
    learn_tokens: Annotated[int, option("--tokens", "Tokens to train on, over all epochs.", min=1)] = 5_000_000,
    num_ids: Annotated[int, option("--vocabulary", "Token ids to draft, the most frequent ones.", min=16)] = 8192,
    layers: Annotated[int | None, option("--layers", "Trained layers; medusa has none. Default: 1.", min=1)] = None,
    heads: Annotated[int, option("--heads", "Tokens ahead: heads of medusa, a block of dspark.", min=1, max=16)] = 4,
    markov: Annotated[str, option("--markov", "Markov head of dspark: vanilla, gated or rnn.")] = "vanilla",
    exit_layers: Annotated[int, option("--exit-layers", "First layers of the target, for early-exit.", min=1)] = 4,
    hidden: Annotated[int, option("--hidden", "Hidden size of a distilled model.", min=32)] = 192,
    unroll: Annotated[int, option("--unroll", "Unrolled training steps of eagle and eagle3.", min=1, max=8)] = 3,
    start: Annotated[str, option("--from", "Trained eagle to continue: a folder, or default: the bundled one.")] = "",
    learning_rate: Annotated[float, option("--learning-rate", "Peak learning rate.", min=1e-7, max=1.0)] = 1e-3,
    seed: Annotated[int, option("--seed", "Equal seeds give equal data in equal order.", min=0, max=2**42)] = 0,
    device: Annotated[str, option("--device", "auto, cpu or cuda:N.")] = "auto",
    data_home: Annotated[Path | None, option("--data", "Folder of texts; empty: OUTRIDER_HOME/training/data.")] = None,
    restart: Annotated[bool, option("--restart", "Start again and ignore an interrupted run.")] = False,
) -> None:
    """Train a drafter on texts that the target generates.

    The target answers a list of prompts once; its texts and hidden states are kept for later trainings. Held-out
    prompts measure the acceptance. Repeat the command to continue an interrupted run.
    """
    check_installed("torch", "models")
    from outrider.train.run import TrainingOrder, train  # torch and transformers: seconds

    command = shlex.join(["outrider", *sys.argv[1:]])
    given = context.params | {"out": out, "prompts": prompts, "data_home": data_home, "command": command}  # no texts
    order = from_plain(TrainingOrder, {name: value for name, value in given.items() if value is not None})
    with _TrainingProgress() as progress:
        card = train(order, progress)
    _print_results(out, card, target)


class _TrainingProgress(bars.Progress):
    """Progress of the training on the terminal."""

    def __init__(self) -> None:
        columns = (bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn())
        numbers = (bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        super().__init__(*columns, *numbers, console=Console(stderr=True))
        self._named: dict[str, bars.TaskID] = {}
        self._printed_results: dict[str, Any] | None = None

    def on_status(self, text: str) -> None:
        self.console.print(text, style="dim")

    def on_data(self, what: str, progress: data.DataProgress) -> None:
        self.update(self._task(what, progress.total), completed=progress.done, description=f"texts {what}")

    def on_step(self, report: loop.Report) -> None:
        task, done = self._task("learning", report.total), min(report.tokens, report.total)
        self.update(task, completed=done, description=f"learning, loss {report.loss:.3f}")
        if report.held_out is not self._printed_results:
            self._printed_results = report.held_out
            found = report.held_out["all"]
            rates = " ".join(f"{rate:.2f}" for rate in found["acceptance"])
            self.console.print(
                f"{report.measured_at:,} tokens: held-out {rates}, length {found['acceptance_length']:.2f}"
            )

    def _task(self, name: str, total: int) -> bars.TaskID:
        if name not in self._named:
            self._named[name] = self.add_task(name, total=total)
        return self._named[name]


def _print_results(out: Path, card: Card, target: str) -> None:
    console = Console()
    table = Table("held-out prompts", "guess 1", "2", "3", "4", "tokens per step")
    for kind, found in card.metrics.items():
        rates = [f"{rate:.2f}" for rate in found["acceptance"]]
        table.add_row(escape(kind), *rates, f"{found['acceptance_length']:.2f}")
    console.print(table)
    named = "" if target == DEFAULT else f"--target {shlex.quote(target)} "
    kind = SERVED_AS.get(card.method, card.method)
    drafter = shlex.quote(f"{kind}:{out}")
    console.print(f"{out} is ready: outrider up {named}--drafter {drafter}", soft_wrap=True, markup=False)
