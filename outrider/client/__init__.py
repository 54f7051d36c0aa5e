"""Clients of the coordinator over gRPC."""
