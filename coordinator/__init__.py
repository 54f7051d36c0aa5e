"""Coordinator: the service that clients call. It never imports torch and is the only user of Redis."""
