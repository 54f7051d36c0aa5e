"""Guesses: runs ahead of the committed position, rolls back on commits."""
