"""Fuzzing of the five edges: mutated well-formed messages and raw bytes against real processes. See `__main__`."""
