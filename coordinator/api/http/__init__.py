"""HTTP API of the coordinator: OpenAI's API, the playground, health and metrics."""
