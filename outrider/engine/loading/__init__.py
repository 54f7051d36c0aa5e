"""Loading: from a model's files to an engine."""
