"""Shares of a step: of tenants with many sessions, and of prompts beside guesses."""
