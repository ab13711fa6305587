"""Prompts are read by an engine in a process of its own, and answered by another, which gets their KV."""
