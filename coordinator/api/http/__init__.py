"""The coordinator's HTTP edge: OpenAI's API, the playground, health and metrics."""
