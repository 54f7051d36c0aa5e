"""`outrider bench capacity --fleet`: fleets of several sizes, or one that runs, under concurrent sessions."""
