"""One script per peer, run inside that peer's own virtual environment."""
