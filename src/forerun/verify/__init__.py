"""Verification: which part of a draft stands, and the target's own token after it."""
