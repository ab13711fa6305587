"""Checks that a user's own model and configuration are lossless: `forerun verify`."""
