"""No drafter: plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, TargetInfo


@dataclass(frozen=True, slots=True)
class NoDrafterConfig:
    """The settings of `NoDrafter`, of which there are none; the default, so that plain decoding needs no branch."""

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """Zero: there are no drafts."""
        return 0

    def build(self, target: TargetInfo) -> Drafter:  # noqa: ARG002 - the signature is that of all drafters
        """Make the drafter."""
        return NoDrafter()


class NoDrafter:
    """Drafts nothing; `needs` names hidden states of the target that are kept for another reader."""

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        self.needs = needs

    def start(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return an empty draft for each request."""
        return [NO_DRAFT] * len(context.requests)

    def stop(self, sequence: Sequence) -> None:
        """Do nothing: no state was kept."""
