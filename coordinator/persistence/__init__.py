"""Persistence of sessions, workers and pair history in Redis."""
