"""Tests of benchmarks/swinging_load."""
