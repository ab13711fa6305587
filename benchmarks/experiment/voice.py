"""What is printed while an experiment runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console


@dataclass(slots=True)
class Voice:
    """Everything that is said, and the warnings among it, which go into the results."""

    console: Console
    warnings: list[str] = field(default_factory=list)

    def tell(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print a warning and keep it."""
        self.warnings.append(line)
        self.tell(f"⚠️  Warning: {line}")
