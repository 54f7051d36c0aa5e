"""Load on Outrider as its clients make it."""
