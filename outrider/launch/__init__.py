"""Processes of `outrider up`."""
