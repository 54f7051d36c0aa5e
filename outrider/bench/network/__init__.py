"""`outrider bench network`."""
