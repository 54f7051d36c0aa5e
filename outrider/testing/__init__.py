"""Toy models and an emulated link, for tests and benchmarks."""
