"""Load on an OpenAI-compatible server, and what it answers: `forerun bench serve`."""
