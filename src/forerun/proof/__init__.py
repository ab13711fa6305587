"""Proof of losslessness for a user's own model and configuration."""
