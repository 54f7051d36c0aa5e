"""Guesses for a `vllm serve` that keeps its front door: a scheduler, a coordinator's client, and vLLM's own draws."""
