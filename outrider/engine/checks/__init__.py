"""Checks before an engine serves: its logits against the model's own, its arithmetic, its cost."""
