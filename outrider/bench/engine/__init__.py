"""`outrider bench engine`."""
