"""Admission of sessions: quotas of API keys, seats at verifiers."""
