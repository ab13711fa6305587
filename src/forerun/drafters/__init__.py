"""Drafters: one file per method, which knows neither the other methods nor the verifiers."""
