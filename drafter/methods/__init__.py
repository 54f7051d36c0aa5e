"""The drafting methods, one module each; `registry` finds them by name."""
