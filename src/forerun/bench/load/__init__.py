"""Loads an OpenAI-compatible server and measures its answers: `forerun bench serve`."""
