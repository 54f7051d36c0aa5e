"""`outrider tune`: the best number of a target's own layers to draft with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from outrider.base.config import check_installed, home, option

_PAYS = 1.05


def tune(
    target: Annotated[str, option("--target", "The target: a directory, a .gguf file, a hub id.")] = "default",
    prompts: Annotated[Path | None, option("--prompts", "JSON lines with `prompt`. Default: held-out ones.")] = None,
    num_prompts: Annotated[int, option("--num-prompts", "Number of prompts.", min=1)] = 20,
    max_tokens: Annotated[int, option("--max-tokens", "Maximum length of an answer.", min=8)] = 96,
    gamma_max: Annotated[int, option("--gamma-max", "Maximum number of tokens guessed ahead.", min=1, max=16)] = 6,
    device: Annotated[str, option("--device", "auto, cpu or cuda:N.")] = "auto",
) -> None:
    """Measure drafters made of the target's first layers, for each number of layers.

    The table shows the acceptance, and the speed on one machine relative to plain decoding by the measured cost curve.
    """
    check_installed("torch", "models")
    from outrider.train import data  # torch and transformers: seconds
    from outrider.train.tune import tune

    console = Console(stderr=True)
    selected = (data.shipped("heldout") if prompts is None else data.read_prompts(prompts))[:num_prompts]
    with console.status("loading") as status:
        exits = tune(
            target,
            selected,
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
    text = (
        "no early exit is faster on one machine; on a separate drafter machine one may be. With training, fewer "
        "layers suffice: outrider train early-exit"
    )
    if best.speed_up >= _PAYS:
        text = f"best: outrider up --target {shlex.quote(target)} --drafter early-exit:{best.layers}"
    Console().print(text, soft_wrap=True, markup=False)
