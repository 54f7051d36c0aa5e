"""What an engine must show before it serves: its answers against the model's own, its arithmetic, its cost."""
