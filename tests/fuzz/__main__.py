"""`python -m tests.fuzz`: fuzz the five edges of its own fleet and report the findings.

Every input has a number: the same seed, edge and number make the same bytes. A failure is reported with the command
that sends it again, and kept as a file that every later run sends first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz import campaign
from tests.fuzz.calls import open_channel
from tests.fuzz.case import CASES
from tests.fuzz.corpus import Known
from tests.fuzz.fleet import Fleet, running
from tests.fuzz.generators import EDGES
from tests.fuzz.workers import Stage

RATIO = 1.10  # limit for the slowdown of a neighbour's tokens, if measured


def main() -> int:
    options = _options()
    print(f"seed {options.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="outrider-fuzz-") as spare,
        running(options.folder or Path(spare), paced=options.measure) as (fleet, known),
    ):
        if options.only is not None:
            return asyncio.run(_again(fleet, known, options))
        found = asyncio.run(_run(fleet, known, options))
    if options.measure and (found["neighbour"]["ratio"] or 0) > RATIO:
        found["problems"].append(f"the neighbour became {found['neighbour']['ratio']} times as slow")
    _tell(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found["problems"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--inputs", type=int, default=2_000, help="inputs an edge: requests, connections, or messages of streams"
    )
    parser.add_argument("--seed", type=int, default=None, help="absent: another one each time")
    parser.add_argument("--edge", choices=EDGES, action="append", help="only these")
    parser.add_argument("--only", type=int, help="the number of one input of one edge, to send it again")
    parser.add_argument("--rate", type=float, default=0.0, help="inputs a second at most; 0: as many as there can be")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="pace the verifier, rest in between, and hold the "
        f"neighbour's speed beside the inputs against its speed alone (at most {RATIO})",
    )
    parser.add_argument("--keep", type=Path, default=CASES, help="folder for inputs that fail")
    parser.add_argument("--folder", type=Path, help="where models and logs go and stay; absent: nowhere")
    parser.add_argument("--json", help="file for the account")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(2**32)
    if options.only is not None and (options.edge is None or len(options.edge) != 1):
        parser.error("--only needs one --edge")
    return options


async def _run(fleet: Fleet, known: Known, options: argparse.Namespace) -> dict[str, Any]:
    edges = options.edge or list(EDGES)
    return await campaign.run(
        fleet, known, edges, options.inputs, options.seed, rate=options.rate, turns=options.measure, keep=options.keep
    )


async def _again(fleet: Fleet, known: Known, options: argparse.Namespace) -> int:
    """Send one input and print all responses."""
    edge = options.edge[0]
    again = campaign.Campaign(fleet, known, options.seed, rate=0, turns=False, keep=None)
    case = again.case(edge, options.only)
    print(case.to_json())
    async with open_channel(fleet.address(edge)) as channel:
        outcome = await again.one(case, channel, Stage(known, 1))
    print(outcome)
    bad = [*fleet.dead(), *fleet.complaints()]
    print(*bad, sep="\n")
    return 1 if bad or outcome.problem else 0


def _tell(found: dict[str, Any]) -> None:
    for edge in found["edges"]:
        results = ", ".join(f"{name} {count}" for name, count in edge["results"].items())
        print(f"{edge['edge']:8} {edge['inputs']} inputs in {edge['cases']} calls, {edge['seconds']:g} s: {results}")
    print(f"neighbour: {found['neighbour']}")
    print(
        f"{found['inputs']} inputs in {found['seconds']:g} s, {len(found['problems'])} problems, seed {found['seed']}"
    )
    for problem in found["problems"]:
        print(problem)


if __name__ == "__main__":
    sys.exit(main())
