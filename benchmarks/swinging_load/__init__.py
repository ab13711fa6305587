"""Loads servers with bursts of requests, to see which configuration serves most at equal latency."""
