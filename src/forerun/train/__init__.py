"""Trains heads that draft for a target."""
