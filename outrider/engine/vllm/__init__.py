"""The target on vLLM: its scheduler and workers with Outrider's guesses, draws and acceptance.

Everything that touches vLLM's insides lies in this package; `compatibility` lists the points.
"""
