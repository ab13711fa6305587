"""Whether what a user gave is a number to compute with."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that can be computed with: finite, and not so long that no float has it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
