"""The interface of drafters whose chains and trees a device with the texts can draft in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forerun.drafters.base import DraftRequest

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.ops.cuda.table import DeviceTable, RuleTable


class DeviceChains(Protocol):
    """Drafts chains, or trees, after the texts of a device's table; see `drafters.neural.device`."""

    writes_trees: bool
    """Whether a draft may be a tree."""

    def may_draft(self, request: DraftRequest, *, is_pending: bool) -> bool:
        """Whether the device can draft for a sequence right after the step that is about to begin; asked once in each step.

        Args:
            request: what is known before the step. It has a place for each token, the last one at `num_computed`, and
                `max_tokens` is 0 where no draft is wanted.
            is_pending: the step before has not been read, so that the sequence may have more tokens than the host knows.
        """
        ...

    def propose(
        self,
        slots: Tensor,
        limits: Tensor,
        depths: Tensor,
        num_computed: Tensor,
        features: Mapping[str, Tensor],
        *,
        most_tokens: int,
    ) -> None:
        """Draft, right after the table has got a step's tokens, and write the drafts to it.

        Args:
            slots: [N] int32; -1: nothing for this one.
            limits: [N] int32, tokens of each draft, at most.
            depths: [N] int32, how deep each may be; no more than its limit, and 0 where a text has ended.
            num_computed: [N] int32, places that had KV before the step.
            features: of the target, see `DraftContext`.
            most_tokens: at least the highest of the limits.
        """
        ...

    def note(self, request: DraftRequest, *, start: int) -> None:
        """Take note that the device has answered a request, as it was after the step: it has read places from `start` on."""
        ...

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        ...


@runtime_checkable
class DraftsOnDevice(Protocol):
    """A drafter whose chains, or trees, a device with the texts can draft in its place."""

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """What drafts there, by the `sample` of `ops.cuda.sampling` or a kernel of that name; None where it cannot."""
        ...
