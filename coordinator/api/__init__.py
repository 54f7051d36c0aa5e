"""APIs of the coordinator: gRPC for clients and workers, HTTP for OpenAI clients."""
