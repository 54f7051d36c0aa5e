"""`outrider bench capacity`."""
