"""Measures of the shape of the code base: `python -m tests.shape` prints each with its figure and its target."""
