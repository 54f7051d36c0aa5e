"""Predictions of `outrider bench network`, by the coordinator's simulator in virtual time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from outrider.bench.common.remote_pair import ThrottledTimes
from outrider.bench.common.report import import_on_use
from outrider.bench.network.cases import GAMMA, PLAIN, WARM_TOKENS, LinkCase, NetworkMode
from outrider.bench.network.figures import NetworkResults
from outrider.protocol.cost_curve import CostCurve

_TOKENS = 1024  # of every case


def prediction_cases(results: NetworkResults) -> dict[tuple[LinkCase, NetworkMode], dict[str, Any]]:
    """Return the simulator's input for links that are not narrow, with the overhead measured on the shortest one."""
    overhead = _overhead_ms(results)
    return {
        (link, mode): {
            "world": {**results.worlds[link], "cost": _plain_step_cost(results), "overhead_ms": overhead},
            "wishes": mode.request_options,
            "tokens": _TOKENS,
            "warm": WARM_TOKENS,
            "gamma_max": GAMMA,
        }
        for link, by_mode in results.measured.items()
        if not link.kib_per_s
        for mode in by_mode
    }


def simulate(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the simulator in its own process: this package must not import the coordinator."""
    command = [sys.executable, "-P", "-m", "coordinator.control.simulation"]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    replies: list[dict[str, Any]] = json.loads(done.stdout)
    return replies


def verifier_cost(times: ThrottledTimes) -> tuple[list[int], list[float]]:
    """Return the verifier's cost curve in the simulator's format."""
    curve = parse_step_times(times.verify)
    return list(curve.rows), list(curve.ms)


def parse_step_times(text: str) -> CostCurve:
    """Parse `tokens:ms,…` as `--pace` does."""
    curve: CostCurve = import_on_use("torch", "models", "outrider.engine.throttled").parse_pace(text)
    return curve


def _shortest(results: NetworkResults) -> LinkCase:
    return min(results.measured, key=lambda link: link.rtt_ms)


def _plain_step_cost(results: NetworkResults) -> tuple[list[int], list[float]]:
    """Return the verifier's cost curve, plus the overhead of a plain step."""
    tokens, throttled_ms = results.worlds[_shortest(results)]["cost"]
    overhead = max(0.0, _plain_ms(results) - throttled_ms[0])
    return tokens, [ms + overhead for ms in throttled_ms]


def _overhead_ms(results: NetworkResults) -> float:
    """Return the time of a round in turns, minus a plain step, the drafter's steps and the link."""
    link = _shortest(results)
    mode, runs = next((m, r) for m, r in results.measured[link].items() if m.gamma and m.ahead is False)
    assert mode.gamma is not None
    known = _plain_ms(results) + mode.gamma * float(results.worlds[link]["draft_ms"]) + link.rtt_ms
    return max(0.0, runs.step_ms - known)


def _plain_ms(results: NetworkResults) -> float:
    return next(runs.step_ms for mode, runs in results.measured[_shortest(results)].items() if mode.name == PLAIN)
