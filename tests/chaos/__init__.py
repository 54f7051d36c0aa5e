"""A fault campaign against a real cluster: `make chaos`, `python -m tests.chaos --help`."""
