"""The engine: a model with the KV caches of many sessions. One engine serves drafter and verifier alike."""

from outrider.engine.interface import Engine, Rows, StepResult

__all__ = ["Engine", "Rows", "StepResult"]
