"""The checks of an engine before it serves: its logits against the model's own, the cost of its steps."""
