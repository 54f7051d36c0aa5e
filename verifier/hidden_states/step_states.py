"""The hidden states of a step in wire format, for all its sessions at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog
import torch

from outrider.engine import StepResult
from outrider.hidden_states.projection import Projection
from outrider.hidden_states.rows import encode
from outrider.protocol.hidden_states.messages import FINAL_STATES, StateSpec

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows of a step that one session sends."""

    specs: Sequence[StateSpec]
    rows: Sequence[int]


SentRows = dict[int, torch.Tensor]  # by number of the spec  # [tokens, row]


def wire_states(
    computed: StepResult, kept: Sequence[KeptRows], find: Callable[[str], Projection | None]
) -> list[SentRows]:
    """Return each session's rows on the CPU: the next step overwrites the engine's memory.

    Sessions that read the same are computed together, with all their rows: a device then need not be told which are
    kept. Those whose projection is gone get nothing, nor do those whose states cannot be computed.
    """
    sent: list[SentRows] = [{} for _ in kept]
    sharing: dict[StateSpec, list[tuple[int, int]]] = {}  # sessions and their numbers for what they share
    for index, each in enumerate(kept):
        for spec in each.specs:
            sharing.setdefault(replace(spec, number=0, width=0), []).append((index, spec.number))
    for spec, sessions in sharing.items():
        projection = find(spec.projection) if spec.projection else None
        if spec.projection and projection is None:
            continue
        parts = [computed.hidden_states[index] for index, _ in sessions]
        try:
            states = _columns(torch.cat(parts), spec, computed.layers)
            if projection is not None:
                states = projection(states)
            wire = states.to(torch.float16).cpu() if spec == FINAL_STATES else encode(states, float8=spec.float8)
        except torch.AcceleratorError:
            raise  # later steps would fail as well
        except Exception:  # also of memory: the sessions must not end
            log.exception("hidden states not computed", layers=spec.layers, projection=spec.projection)
            continue
        for (index, number), part in zip(sessions, torch.split(wire, list(map(len, parts))), strict=True):
            sent[index][number] = part[list(kept[index].rows)]
    return sent


def _columns(states: torch.Tensor, spec: StateSpec, layers: Sequence[int]) -> torch.Tensor:
    """Return the states that a spec joins; a row has the final one, and those after `layers` behind it."""
    if not layers:
        return states
    width = states.shape[1] // (1 + len(layers))
    blocks = [1 + layers.index(layer) for layer in spec.layers] or [0]
    return torch.cat([states[:, block * width : (block + 1) * width] for block in blocks], dim=1)
