"""The processes of `outrider up`."""
