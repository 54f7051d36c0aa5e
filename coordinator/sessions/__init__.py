"""Sessions: start, drafting, verification, commits, resumption."""
