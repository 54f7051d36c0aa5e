"""Toy models and a link emulator, for tests and benchmarks."""
