"""HTTP API of the coordinator: OpenAI's and Anthropic's APIs, the playground, health and metrics."""
