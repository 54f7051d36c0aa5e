"""Statistics that a coordinator reports: of one generation, and of itself."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.fleet import WorkerInfo


@dataclass(frozen=True, slots=True)
class PlanStats:
    """Expected and measured throughput of one speculation plan."""

    plan: str  # label for people
    steps: int = 0  # 0: another plan was in force
    expected_tokens_per_second: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """Guesses of one kind of drafter for one request."""

    kind: str
    attached_order: int = 0  # 1: the kind attached first
    guessed: int = 0
    accepted: int = 0  # accepted tokens that it guessed; several drafters may have guessed the same token


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Speculation statistics and timings of one generation; see Stats in coordinator.proto."""

    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    offered_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    acceptance_length: float = 0.0
    acceptance_rate: float = 0.0
    mean_gamma: float = 0.0
    bytes_per_accepted_token: float = 0.0
    bytes_per_guessed_token: float = 0.0
    time_to_first_token_ms: float = 0.0
    duration_ms: float = 0.0
    tokens_per_second: float = 0.0
    failovers: int = 0
    drafter_losses: int = 0
    drafter: str = ""
    mean_step_ms: float = 0.0
    mean_wait_ms: float = 0.0
    mean_draft_ms: float = 0.0
    cached_tokens: int = 0
    feature_bytes: int = 0
    drafters: tuple[DrafterStats, ...] = ()
    plans: tuple[PlanStats, ...] = ()
    missed: int = 0
    draft_ms: float = 0.0
    missed_at_hand: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One coordinator and its workers."""

    version: str
    coordinator_id: str
    sessions: int
    durable: bool  # Redis is reachable: sessions survive this coordinator
    workers: tuple[WorkerInfo, ...] = ()
