"""Benchmarks: scripts that print ratios measured within one run. Never timed tests."""
