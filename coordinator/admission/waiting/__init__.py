"""Waiting for a verifier's seat: priority classes, ageing, deadlines."""
