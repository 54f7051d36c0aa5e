"""The drafting methods, one module each. See `registry` for how one is chosen."""
