"""What the Python benchmarks share."""
