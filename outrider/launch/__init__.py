"""Processes of `outrider up`, and the options that say what to start."""
