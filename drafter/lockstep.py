"""Drafting of several sessions whose steps are computed together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

Input = TypeVar("Input")
Output = TypeVar("Output")
Result = TypeVar("Result")


def run_in_lockstep(
    sessions: Mapping[str, Generator[Input, Output, Result]],
    compute: Callable[[dict[str, Input]], Mapping[str, Output]],
) -> dict[str, Result]:
    """Run generators that yield inputs for `compute` and receive outputs; one left out ends without a result."""
    results: dict[str, Result] = {}
    received: Mapping[str, Output | None] = dict.fromkeys(sessions)
    while received:
        batch: dict[str, Input] = {}
        for session, output in received.items():
            try:
                batch[session] = sessions[session].send(output)  # type: ignore[arg-type]
            except StopIteration as stop:
                results[session] = stop.value
        received = compute(batch) if batch else {}
    return results
