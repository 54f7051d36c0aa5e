"""The only thing clients see: sessions, workers, γ. Never imports torch; the only user of Redis."""
