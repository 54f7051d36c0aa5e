"""Settings of the verifier."""

from __future__ import annotations

from pydantic import Field

from outrider.base.config import WorkerSettings
from outrider.models.hub import DEFAULT


class VerifierSettings(WorkerSettings):
    """Serve a target model: verify guesses and commit tokens."""

    target: str = Field(DEFAULT, description="Target model: a directory, a .gguf file, a hub id, or 'default'.")
    tensor_parallel: int = Field(1, ge=1, description="Number of processes that the model is split over.")
    max_waiting: int = Field(256, ge=0, description="Maximum number of sessions that wait for KV cache.")
    prefill_rows: int = Field(512, ge=1, description="Maximum number of prompt tokens per step.")
    prefill_stretch: float = Field(
        1.6, ge=1.1, le=1000, description="Maximum factor by which prompt tokens lengthen a step while sessions decode."
    )
    tenant_stretch: float = Field(
        1.05,
        ge=1.01,
        le=1000,
        description="Maximum factor by which tenants with many sessions lengthen the steps of those with few.",
    )
    guess_rows: int = Field(32, ge=1, le=256, description="Maximum number of guesses per session and step.")
