"""Trained heads that draft from the target's features, in the layouts they are published in."""
