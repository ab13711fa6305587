"""How a measurement tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def ignore(message: str) -> None:
    """Show no progress."""
