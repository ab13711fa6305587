"""Numerics; every fast op lies beside its naive twin, with a test that they agree."""
