"""The simulator against reality: the same loads served and simulated."""
