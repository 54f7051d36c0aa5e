"""Settings of the three services: what they take as flags and variables, and what the launcher sets."""
