"""Simulation as a program: it predicts the throughput of a pair over a link.

echo '[{"world": {"rtt_ms": 15}, "wishes": {"gamma": 4}}]' | python -m coordinator.control.simulation
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from coordinator.control.gamma import FixedChoices
from coordinator.control.simulation.session import SimulationResult
from coordinator.control.simulation.verifier import Simulation
from coordinator.control.simulation.world import World
from coordinator.control.throughput_model import SpeculationPlan
from outrider.protocol.cost_curve import CostCurve


def predict(case: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted throughput of one case.

    Fields: `world`, or `worlds` for several in turn, with `cost` as [[tokens], [ms]]; `wishes` by the fields of
    FixedChoices; `tokens` per world; `warm` tokens before; `seeds`; `gamma_max`.
    """
    worlds = [_world(fields) for fields in case.get("worlds", [case.get("world", {})])]
    fixed = FixedChoices(**case.get("wishes", {}))
    total = SimulationResult()
    ends_ms: list[float] = []
    plans: list[tuple[float, SpeculationPlan]] = []
    proposed: list[tuple[float, int]] = []
    for seed in range(case.get("seeds", 3)):
        simulation = Simulation(worlds[0], case.get("gamma_max", 16), fixed, seed=seed)
        if case.get("warm"):
            simulation.run(case["warm"])
        ends_ms.clear()
        for world in worlds:
            simulation.world = world
            result = simulation.run(case.get("tokens", 512))
            for name in ("tokens", "steps", "ms", "waited_ms", "checked", "missed", "missed_at_hand"):
                setattr(total, name, getattr(total, name) + getattr(result, name))
            ends_ms.append(simulation.now)
        plans, proposed = simulation.plans, simulation.proposed
    return {
        "tokens_per_s": total.tokens_per_s,
        "tokens_per_step": total.tokens / max(1, total.steps),
        "missed": total.missed,
        "missed_at_hand": total.missed_at_hand,
        "plans": [{"ms": ms, "label": plan.label, **asdict(plan)} for ms, plan in plans],  # of the last seed
        "offered": proposed,  # of the last seed
        "ends_ms": ends_ms,
    }


def _world(fields: dict[str, Any]) -> World:
    cost = {"cost": CostCurve(*map(tuple, fields["cost"]))} if "cost" in fields else {}
    return World(**(fields | cost))


def main() -> None:
    """Read cases as a JSON list from standard input and write their predictions to standard output."""
    json.dump([predict(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
