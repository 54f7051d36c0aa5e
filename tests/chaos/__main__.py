"""`python -m tests.chaos`: inject faults into a real cluster for some minutes and report the results."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.chaos.campaign import CLIENTS, WARM_S, Options, run
from tests.chaos.faults import MEAN_PAUSE_S
from tests.chaos.report import MAX_GAP_AFTER_KILL_S, show


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long faults are injected.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Makes faults and clients again; -1 draws one.")] = -1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here, too.")] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time, every other one over HTTP.")] = CLIENTS,
    pause_s: Annotated[float, typer.Option(min=0.1, help="Mean pause between faults.")] = MEAN_PAUSE_S,
    warm_s: Annotated[float, typer.Option(min=1, help="Load without faults before, seconds.")] = WARM_S,
    max_gap_s: Annotated[float, typer.Option(help="Largest p99 gap after a kill.")] = MAX_GAP_AFTER_KILL_S,
    keep: Annotated[bool, typer.Option(help="Keep the logs, also when all went well.")] = False,
) -> None:
    """Run a campaign. Exit with status 1 on any violation, 130 if interrupted."""
    seed = random.SystemRandom().getrandbits(32) if seed < 0 else seed
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
    options = Options(
        seed=seed, seconds=60 * minutes, clients=clients, mean_pause_s=pause_s, warm_s=warm_s, max_gap_s=max_gap_s
    )
    try:
        outcome = asyncio.run(run(folder, options, lambda line: print(line, flush=True)))
    except (asyncio.CancelledError, KeyboardInterrupt):
        if keep:
            print(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder)
        sys.exit(130)
    show(outcome)
    if json_file is not None:
        json_file.write_text(json.dumps(outcome.to_json(), indent=1) + "\n")
    if keep or outcome.failures:
        print(f"logs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    sys.exit(1 if outcome.failures else 0)


if __name__ == "__main__":
    typer.run(main)
