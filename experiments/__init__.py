"""Specs by task, and benchmarks of the testbed itself under ``perf/``."""
