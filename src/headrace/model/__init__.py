"""Frozen values and pure functions over them: what flows. No I/O, no threads, no clocks."""
