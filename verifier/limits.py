"""The load that a verifier accepts: sessions, cached tokens, tokens per step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The load that a verifier accepts."""

    max_sessions: int
    max_waiting: int
    kv_tokens: int
    prefill_rows: int  # prompt tokens per step, all sessions together
    prefill_stretch: float  # how many times as long they may make a step while other sessions decode
    guess_rows: int  # guesses verified per session and step
    tenant_stretch: float = 1.05  # how many times as long heavy tenants may make the steps of tenants with few sessions
