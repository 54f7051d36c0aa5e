"""The training methods of drafters."""
