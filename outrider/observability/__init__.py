"""Metrics, traces and request context."""
