"""A script per peer, which runs in that peer's own virtual environment."""
