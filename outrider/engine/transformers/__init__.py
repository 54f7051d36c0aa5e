"""The engine for any causal LM of transformers: its own forward, with the attention over a paged KV cache."""
