"""A script per engine, which runs in a process and virtual environment of its own."""
