"""What every process needs: settings, logs, asyncio and gRPC helpers."""
