"""`outrider bench overhead`."""
