"""What all benchmarks use."""
