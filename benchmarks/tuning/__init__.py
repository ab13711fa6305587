"""Measures whether `forerun tune` finds the best configuration, and in what share of an exhaustive sweep's time."""
