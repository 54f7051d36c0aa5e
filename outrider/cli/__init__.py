"""The command line `outrider`: start it, talk to it, look after it."""

from outrider.cli.app import main

__all__ = ["main"]
