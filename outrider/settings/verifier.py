"""Settings of the verifier."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WrapValidator

from outrider.base.config import DrafterKey, Int, WorkerSettings
from outrider.models.hub import DEFAULT


class VerifierSettings(WorkerSettings, DrafterKey):
    """Serve a target model: verify guesses and commit tokens."""

    target: str = Field(DEFAULT, description="Target model: a directory, a .gguf file, a hub id, or 'default'.")
    served_model_name: str = Field("", description="Name of the target in the fleet; empty: its own.")
    engine: str = Field(
        "auto",
        pattern="^(auto|native|cuda|transformers|vllm|mock)$",
        description="What runs the model: auto (the fastest that works; on CUDA vLLM where it is installed), native "
        "(CPU kernels), cuda (CUDA graphs), transformers, vllm, or mock (no model, for measuring overhead). A named "
        "engine runs, or the start fails.",
    )
    quantization: str = Field(
        "none",
        pattern="^(none|int8|fp8|bitsandbytes)$",
        description="none, int8 (weights only, on a CPU), or with --engine vllm fp8 or bitsandbytes.",
    )
    tensor_parallel: Int = Field(1, ge=1, description="Number of processes that the model is split over.")
    pipeline_parallel: Int = Field(1, ge=1, description="Number of stages of the model: only 1, since texts differed.")
    kv_tokens: Annotated[Int, Field(ge=64), WrapValidator(lambda n, check: 0 if n in (0, "0") else check(n))] = Field(
        0, description="KV cache capacity, tokens of all sessions together; 0: 65,536, on a GPU what fits."
    )
    gpu_memory: float = Field(0.0, ge=0, le=1, description="With --engine vllm: share of GPU memory; 0: vLLM's own.")
    max_model_len: Int = Field(
        0, ge=0, description="With --engine vllm: maximum tokens of prompt and output; 0: the model's context."
    )
    state_layers: str = Field("", description="With --engine vllm: layers whose states drafters read, as in 2,14,27.")
    vllm_args: str = Field("", description="With --engine vllm: further arguments of `vllm serve`.")
    max_waiting: Int = Field(256, ge=0, description="Maximum number of sessions that wait for KV cache.")
    prefill_rows: Int = Field(512, ge=1, description="Maximum number of prompt tokens per step.")
    prefill_stretch: float = Field(1.6, ge=1.1, le=1000, description="Most by which prompts lengthen others' steps.")
    tenant_stretch: float = Field(
        1.05,
        ge=1.01,
        le=1000,
        description="Maximum factor by which tenants with many sessions lengthen the steps of those with few.",
    )
    own_drafter: str = Field(
        "",
        description="Drafter in this process, whose guesses cross no network: KIND, KIND:MODEL, a model, or auto; "
        "empty: none.",
    )
    guess_rows: int = Field(32, ge=1, le=256, description="Maximum number of guesses per session and step.")
