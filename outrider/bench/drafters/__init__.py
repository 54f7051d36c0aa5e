"""`outrider bench drafters`."""
