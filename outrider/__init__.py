"""Outrider: disaggregated, lossless speculative decoding. This package is the core; it imports no service."""
