"""What a verified row costs: the time of a forward pass by its rows, in passes over one row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.errors import ConfigError, one_line


@dataclass(frozen=True, slots=True)
class PassCosts:
    """T(n) / T(1) at some numbers of rows; between them the curve is straight, and beyond them it goes straight on."""

    rows: tuple[int, ...]  # rising, from 1
    ratios: tuple[float, ...]
    seconds: float | None = None  # T(1); None where the costs are assumed

    def of(self, rows: int) -> float:
        """The cost of a pass over so many rows of one sequence."""
        last = self.rows[-1]
        if rows <= last or len(self.rows) == 1:
            return float(np.interp(rows, self.rows, self.ratios))
        slope = (self.ratios[-1] - self.ratios[-2]) / (last - self.rows[-2])
        return self.ratios[-1] + slope * (rows - last)


FLAT = PassCosts(
    (*range(1, 17), 32),
    (1.0, 1.03, 1.08, 1.13, 1.2, 1.25, 1.3, 1.35, 1.44, 1.54, 1.63, 1.73, 1.82, 1.91, 2.01, 2.1, 3.7),
)
"""The CPU kernels' aim: a row costs 3 to 10 % of a pass."""

STEEP = PassCosts((1, 2), (1.0, 1.25))
"""Plain torch on a CPU: a row costs 25 % of a pass."""


def read_costs(path: Path, *, context: int | None = None) -> PassCosts:
    """The costs in a file that `forerun bench curve --output-json` has written.

    Args:
        path: the file.
        context: tokens in the KV cache; None for the shortest context of the file.

    Raises:
        ConfigError: the file cannot be read, is none of `bench curve`, or has no such context.
    """
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
        alone = [point for point in points if point["num_sequences"] == 1]
        contexts = sorted({int(point["context"]) for point in alone})
        wanted = contexts[0] if context is None else context
        here = [point for point in alone if point["context"] == wanted]
        found = sorted((int(point["rows"]), float(point["ratio"])) for point in here)
        seconds = next((point["milliseconds"] / 1e3 for point in here if point["rows"] == 1), None)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"costs: cannot read {path} ({one_line(error)}); give a file of forerun bench curve --output-json"
        ) from None
    if not found:
        raise ConfigError(f"costs: got context {wanted}; {path} has {', '.join(map(str, contexts))}")
    rows, ratios = zip(*found, strict=True)
    return PassCosts(rows, ratios, seconds)
