"""Command-line options of what starts services: `outrider up`, `outrider demo` and the benchmarks."""

from __future__ import annotations

from typing import Annotated, Literal

from outrider.base.config import option

Target = Annotated[str, option("--target", "Target model: a directory, a .gguf file, a hub id, or 'default'.")]
DRAFTER_FORMS = (
    "KIND, KIND:MODEL or a model. Kinds: ngram, suffix, eagle, medusa, early-exit, published, model, translate; + "
    "joins them, as suffix+eagle:PATH. A folder made by `outrider train` or with a published drafter needs no "
    "kind. auto: the best bundled drafter for the target"
)
DrafterChoice = Annotated[str, option("--drafter", f"{DRAFTER_FORMS}.")]
Device = Annotated[str, option("--device", "Device of the verifiers: auto, cpu, cuda or cuda:N.")]
DrafterDevice = Annotated[str, option("--drafter-device", "Device of the drafters.")]
Dtype = Annotated[str, option("--dtype", "auto, float32, bfloat16 or float16.")]
Quantization = Annotated[str, option("--quantization", "Of the target: none, int8 (CPU), fp8 or bitsandbytes (vLLM).")]
Engine = Annotated[
    str,
    option(
        "--engine",
        "What runs the target: auto (the fastest that works; on CUDA vLLM where it is installed), native (CPU "
        "kernels), cuda (CUDA graphs), transformers, vllm, or mock (no model, for measuring overhead; its drafter is "
        "mock too).",
    ),
]
Threads = Annotated[int, option("--threads", "CPU threads of each worker; 0 lets torch choose.", min=0)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], option("--log-level", "Of all services.")]
