"""Sessions, workers and pair history in Redis."""
