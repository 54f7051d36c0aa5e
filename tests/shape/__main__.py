"""`python -m tests.shape`: print each measure of the code's shape with its target. Exit with 1 if one got worse.

A measure has got worse if it is above its ceiling in `ceilings.json`. The ceiling of a measure that is within its
target is the target. `--lower` writes lower ceilings for what has become better; only an editor can raise one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.shape import measures
from tests.shape.measures import Measure

_SHOWN = ("guess", "parents", "sampling")


def main() -> int:
    options = _options()
    measured = measures.static()
    if not options.static:
        measured += measures.of_rounds()
    if options.lower:
        _lower(measured)
    bounds = measures.ceilings()
    _print(measured, bounds, options.show)
    if options.json:
        figures = [asdict(measure) | {"ceiling": bounds.get(measure.name)} for measure in measured]
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    worse = measures.over(measured, bounds)
    for line in worse:
        print(f"worse than before: {line}")
    better = measures.lowered(measured, bounds)
    if better:
        print(f"better than the ceilings, which --lower brings down: {', '.join(better)}")
    return 1 if worse else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.shape", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and findings to FILE")
    parser.add_argument("--static", action="store_true", help="leave out what needs running services")
    parser.add_argument(
        "--show",
        nargs="*",
        default=_SHOWN,
        metavar="WORD",
        help="list what measures with such a word in the name count",
    )
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the figures of now")
    return parser.parse_args()


def _lower(measured: Sequence[Measure]) -> None:
    bounds = measures.ceilings()
    bounds |= measures.lowered(measured, bounds)
    measures.CEILINGS.write_text(json.dumps(dict(sorted(bounds.items())), indent=2) + "\n")


def _print(measured: Sequence[Measure], bounds: dict[str, float], shown: Sequence[str]) -> None:
    width = max(len(measure.name) for measure in measured)
    print(f"{'measure':{width}} {'now':>7} {'target':>7} {'ceiling':>7}")
    for measure in measured:
        figures = f"{measure.now:7g} {measure.target:7g} {bounds[measure.name]:7g}"
        print(f"{measure.name:{width}} {figures}  {'ok' if measure.met else '  '}  {measure.note}".rstrip())
    for measure in measured:
        if any(word in measure.name for word in shown):
            print(f"\n{measure.name}:", *measure.found, sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
