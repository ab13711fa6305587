"""The seam between engine and drafters."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a drafter may know of the target when it is built."""

    vocab_size: int  # token ids are below this
    max_model_len: int  # tokens of the longest sequence
    num_speculative_tokens: int  # the most nodes any draft may have


class DrafterConfig(Protocol):
    """A drafter's own settings: a frozen dataclass whose field names are the user's keys.

    Its `__post_init__` raises `ConfigError` for a value out of range.
    """

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """K where the user gives none; None: the user must give it."""
        ...

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        ...


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that may get a draft: at most `max_tokens` nodes, at most `max_depth` deep."""

    sequence: Sequence
    max_tokens: int
    max_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """What a drafter sees of a step: the sequences to draft for, and the features it asked for.

    `features` maps each name in the drafter's `needs` to the rows of the step's forward pass.
    """

    requests: Listing[DraftRequest]
    features: dict[str, Tensor] = field(default_factory=dict)


class Drafter(Protocol):
    """Bets on the next tokens. It may be wrong, late or silent; the output stays exact.

    `needs` names the target features the runner must keep for it; most drafters need none.
    """

    needs: frozenset[str]

    def start(self, sequence: Sequence) -> None:
        """A sequence has its first step: its prompt is known, perhaps its first tokens too."""
        ...

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return one draft per request, in order; `NO_DRAFT` where there is no bet worth making.

        Steps in which a sequence gets no draft are not reported: catch up from its committed
        tokens. A draft over the request's limits is cut.
        """
        ...

    def stop(self, sequence: Sequence) -> None:
        """A sequence has ended, finished or aborted; its tokens are final."""
        ...
