"""The drafter that never bets: plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, TargetInfo


@dataclass(frozen=True, slots=True)
class SilentConfig:
    """No settings; the engine's default, so that plain decoding needs no branch."""

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """Room for no draft at all."""
        return 0

    def build(self, target: TargetInfo) -> Drafter:  # noqa: ARG002 - every drafter is built alike
        """Make the drafter."""
        return Silent()


class Silent:
    """Gives every sequence an empty draft; `needs` are features that others read."""

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        self.needs = needs

    def start(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return an empty draft for each request."""
        return [NO_DRAFT] * len(context.requests)

    def stop(self, sequence: Sequence) -> None:
        """Nothing was kept."""
