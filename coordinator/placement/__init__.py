"""Placement: a new session goes to the verifier that has its prompt's prefix, within a bound on imbalance."""
