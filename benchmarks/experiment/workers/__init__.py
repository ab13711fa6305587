"""One script per engine, run in a process of its own, in that engine's virtual environment."""
