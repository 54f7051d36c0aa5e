"""Names of the forms of tool calls that the coordinator reads, as vLLM has them where it has these."""

from __future__ import annotations

from typing import Literal

ToolParser = Literal[
    "auto", "hermes", "llama3", "mistral", "json", "qwen3_coder", "mimo", "seed_oss", "glm45", "glm47", "minimax_m2",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "cohere", "granite", "hunyuan_a13b",
    "nemotron", "phi4_mini_json", "lfm2", "olmo3", "pythonic",
]  # fmt: skip
