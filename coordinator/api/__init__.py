"""The coordinator's edges: gRPC for clients and workers, HTTP for OpenAI's clients."""
