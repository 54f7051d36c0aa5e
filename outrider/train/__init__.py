"""Making drafters for a target: data that the target itself writes, and what learns from it."""
