"""Training of drafters for a target, on data that the target generates."""
