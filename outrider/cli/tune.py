"""`outrider tune`: how many of a target's own layers to draft with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from outrider.base.config import home
from outrider.cli.options import option

_PAYS = 1.05


def tune(
    target: Annotated[str, option("--target", "The target: a directory, a .gguf file, a hub id.")] = "default",
    prompts: Annotated[
        Path | None,
        option("--prompts", "JSON lines with `prompt`. Default: those held out from the list that comes along."),
    ] = None,
    num_prompts: Annotated[int, option("--num-prompts", "How many of them to ask.", min=1)] = 20,
    max_tokens: Annotated[int, option("--max-tokens", "Longest answer.", min=8)] = 96,
    gamma_max: Annotated[int, option("--gamma-max", "Most tokens guessed ahead.", min=1, max=16)] = 6,
    device: Annotated[str, option("--device", "auto, cpu or cuda:N.")] = "auto",
) -> None:
    """For each number of layers: how often a drafter of the target's first so many layers would be right, and how much
    faster than plain decoding it would make one machine, by the measured cost of a step.
    """
    from outrider.train import data  # torch and transformers: seconds
    from outrider.train.tune import tune

    console = Console(stderr=True)
    asked = (data.shipped("heldout") if prompts is None else data.read_prompts(prompts))[:num_prompts]
    with console.status("loading") as status:
        exits = tune(
            target,
            asked,
            home() / "training" / "data",
            gamma_max=gamma_max,
            max_tokens=max_tokens,
            device=device,
            status=status.update,
        )
    table = Table("layers", "guess 1 holds", "2", "3", "best γ", "× plain")
    for each in exits:
        rates = [f"{rate:.2f}" for rate in (*each.acceptance, 0.0, 0.0)[:3]]
        table.add_row(str(each.layers), *rates, str(each.gamma), f"{each.speed_up:.2f}")
    Console().print(table)
    best = max(exits, key=lambda each: each.speed_up)
    if best.speed_up >= _PAYS:
        said = f"best: outrider up --target {target} --drafter early-exit:{best.layers}"
    else:
        said = (
            "no early exit would pay on one machine; on a drafter's machine of its own one might. Trained layers make "
            "fewer do: outrider train early-exit"
        )
    Console().print(said, soft_wrap=True)
