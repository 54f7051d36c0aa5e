"""Sessions: begun, drafted, verified, committed, resumed."""
