"""Shared parts of the Python benchmarks."""
