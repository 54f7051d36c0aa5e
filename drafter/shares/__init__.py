"""Shares of a drafter's time: which sessions a drafting step takes when one drafter serves many."""
