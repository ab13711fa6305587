"""What every layer speaks: records of a step and a request, settings, statistics; and small checks of values and files."""
