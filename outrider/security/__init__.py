"""API keys, certificates, channels, and the interceptors that check callers."""
