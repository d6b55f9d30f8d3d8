"""Benchmarks: ratios measured inside one process, because machines are noisy."""
