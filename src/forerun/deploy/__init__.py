"""Replicas and distributed engines."""
