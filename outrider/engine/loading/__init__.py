"""From a model's files to an engine."""
