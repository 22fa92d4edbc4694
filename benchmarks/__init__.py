"""Benchmarks: ./run bench NAME runs the module of that name."""
