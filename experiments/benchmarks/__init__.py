"""Benchmarks: each prints ratios against something measured in the same run."""
