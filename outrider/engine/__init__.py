"""The engine: a model with the KV caches of many sessions, for drafters and verifiers."""

from outrider.engine.interface import Engine, SessionTokens, StepResult

__all__ = ["Engine", "SessionTokens", "StepResult"]
