"""Tests that need vLLM. They run in an environment of their own: `make vllm`."""
