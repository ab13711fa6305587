"""Transformers, forerun and vLLM, plain and speculative, driven by environment variables; docs/experiment.md."""
