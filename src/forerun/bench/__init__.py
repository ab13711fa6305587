"""How fast a configuration is on this machine: `forerun bench`."""
