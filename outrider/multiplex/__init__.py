"""Streams of many sessions between a coordinator and a worker, carried by one gRPC stream."""
