"""Kinds of text: how a session's is recognised, and the pair histories of each kind."""
