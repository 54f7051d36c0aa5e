"""Settings of the verifier."""

from __future__ import annotations

from pydantic import Field

from outrider.base.config import WorkerSettings
from outrider.models.hub import DEFAULT


class VerifierSettings(WorkerSettings):
    """Serve a target model: verify guesses and commit tokens."""

    target: str = Field(DEFAULT, description="Target model: a directory, a .gguf file, a hub id, or 'default'.")
    tensor_parallel: int = Field(1, ge=1, description="Processes that share the model; on CUDA, each has a device.")
    max_waiting: int = Field(256, ge=0, description="Sessions that may wait for KV cache before new ones are refused.")
    prefill_rows: int = Field(512, ge=1, description="Prompt tokens per step, all sessions together, at most.")
    prefill_stretch: float = Field(
        1.6, ge=1.1, le=1000, description="How many times as long prompts may make a step while other sessions decode."
    )
    tenant_stretch: float = Field(
        1.05,
        ge=1.01,
        le=1000,
        description="How many times as long tenants with many sessions may make the steps of tenants with few.",
    )
    guess_rows: int = Field(32, ge=1, le=256, description="Guesses verified per session and step.")
