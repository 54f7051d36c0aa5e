"""What is checked and measured before an engine serves: its logits against the model's own, the cost of its steps."""
