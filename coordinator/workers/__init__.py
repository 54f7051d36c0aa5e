"""Worker pool: connections, load, liveness and trust of verifiers and drafters."""
