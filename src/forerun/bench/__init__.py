"""Measures how fast a configuration is on this machine: `forerun bench`."""
