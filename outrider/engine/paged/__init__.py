"""The common part of engines over a paged KV cache: blocks, steps, and the arithmetic in the fingerprint."""
