"""Whether a file is of the version that this forerun reads."""

from __future__ import annotations


def is_version(found: object, version: int) -> bool:
    """Return whether a file's `found` is the whole number `version`; to `==` alone JSON's true is the version 1."""
    return type(found) is int and found == version
