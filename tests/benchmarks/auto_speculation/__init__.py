"""Tests of benchmarks/auto_speculation."""
