"""Models and workers, as workers report them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.hidden_states.messages import StateSpec


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that a model's makers recommend."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity and size of a model. Equal fingerprints give equal text."""

    name: str
    fingerprint: str
    architecture: str = ""
    vocab_size: int = 0
    vocabulary_digest: str = ""
    context_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    parameters: int = 0
    weights_digest: str = ""
    target_digest: str = ""
    text_digest: str = ""  # of a verifier that promises the text of another engine: the fingerprint there
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def text_id(self) -> str:
        """Return what models that promise the same text have in common."""
        return self.text_digest or self.fingerprint


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    sessions: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    step_ms: float = 0.0
    cost: CostCurve = UNKNOWN_COST
    kv_tokens_idle: int = 0


class Role(enum.IntEnum):
    VERIFIER = 1
    DRAFTER = 2


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    worker_id: str
    role: Role
    address: str
    model: ModelInfo
    kind: str = ""
    capacity: int = 1
    load: WorkerLoad = WorkerLoad()
    draining: bool = False
    round_trip_ms: float = 0.0
    hidden_states: bool = False  # a drafter that needs hidden states
    machine: str = ""  # equal on one machine
    state_spec: StateSpec | None = None  # of a drafter with hidden_states; None: after the final norm, float16
    state_layers: int = 0  # of a verifier: decoder layers whose states it can send
    state_width: int = 0  # of such a state: a verifier's own, or what a drafter needs; 0: unknown, any
    earlier_states: int = 0  # of a drafter with hidden_states: positions before the first verdict's that it reads

    def reads_width_of(self, verifier: WorkerInfo) -> bool:
        """Return whether a verifier's states are as wide as this drafter needs them, as far as both are known."""
        return 0 in (self.state_width, verifier.state_width) or self.state_width == verifier.state_width
