"""The engine: a model with the KV caches of many sessions. One engine serves drafter and verifier alike."""

from outrider.engine.interface import Engine, SessionTokens, StepResult

__all__ = ["Engine", "SessionTokens", "StepResult"]
