"""Drafters that were trained for one target: what they are made of, and the folder they lie in."""
