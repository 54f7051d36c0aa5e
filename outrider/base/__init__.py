"""Settings, logs, asyncio and gRPC helpers of every process."""
