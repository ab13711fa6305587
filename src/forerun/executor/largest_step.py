"""The step that takes the most memory, executed once at the start so that the memory it needs is measured and set aside."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.step import PlannedSequence, SequenceSpec, StepPlan, lay_out
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, LearnsFromTarget, VerifiedRows
from forerun.drafters.device_chains import DeviceChains, DraftsOnDevice
from forerun.executor.base import Executor

if TYPE_CHECKING:
    from forerun.ops.cuda.table import DeviceTable, RuleTable

SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)
"""Rules that need the most memory beside a row's logits."""


class ChainDrafter:
    """Drafts as many tokens as it may, always the same one, and remembers nothing.

    Args:
        needs: the hidden states that are kept, as for the drafter in whose place it stands.
        num_candidates: of each row that are found, likewise.
    """

    def __init__(self, needs: frozenset[str], *, num_candidates: int = 0) -> None:
        self.needs = needs
        self.num_candidates = num_candidates

    def start(self, sequence: Sequence) -> None:
        """See `Drafter`."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """See `Drafter`."""
        return [Draft((0,) * min(one.max_tokens, one.max_depth)) for one in context.requests]

    def stop(self, sequence: Sequence) -> None:
        """See `Drafter`."""

    def learn(self, rows: VerifiedRows) -> None:
        """See `LearnsFromTarget`."""


class MeasuredDrafter(ChainDrafter):
    """Stands for a drafter, and lets the device draft what that one would for all sequences, whatever they are.

    Where the device does not draft for it, drafts are the chains of a `ChainDrafter`.
    """

    def __init__(self, drafter: Drafter) -> None:
        num_candidates = drafter.num_candidates if isinstance(drafter, LearnsFromTarget) else 0
        super().__init__(drafter.needs, num_candidates=num_candidates)
        self._drafter = drafter

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """See `DraftsOnDevice`."""
        if not isinstance(self._drafter, DraftsOnDevice):
            return None
        chains = self._drafter.on_device(table, rules, sample)
        return None if chains is None else _ForAll(chains)


class _ForAll:
    """Implements `DeviceChains`: drafts for every sequence, whatever the network has read of it."""

    def __init__(self, chains: DeviceChains) -> None:
        self.writes_trees = chains.writes_trees
        self.propose = chains.propose

    def may_draft(self, request: DraftRequest, *, is_pending: bool) -> bool:  # noqa: ARG002
        return request.max_tokens > 0

    def note(self, request: DraftRequest, *, start: int) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """How large a step can be.

    `longest` is the most tokens of a sequence, `num_drafted` the most that are drafted for one.
    """

    num_sequences: int
    num_rows: int
    longest: int
    num_drafted: int
    block_size: int

    def run(self, executor: Executor) -> int:
        """Execute it over block 0 alone, whose contents do not matter; the executor must be fresh, with a `ChainDrafter`.

        All sequences are as long as they may be. Most decode, each with a draft, while there are rows; the others
        read the end of their prompts in the rows that are left. All ask for the next draft.

        Returns:
            The number of its rows.
        """
        num_drafted = max(0, min(self.num_drafted, self.longest - 3))
        num_tokens, most_read = max(1, self.longest - num_drafted - 2), max(1, self.longest - 1)
        num_reading = min(self.num_sequences, -(-self.num_rows // most_read))
        num_decoding = self.num_sequences - num_reading
        specs = [self._spec(i, num_tokens if i < num_decoding else most_read) for i in range(self.num_sequences)]
        decoding = [self._planned(i, num_tokens - 1, 1, draft_limit=num_drafted) for i in range(num_decoding)]
        drafts = [NO_DRAFT] * num_decoding
        if decoding:
            drafts = [one.draft for one in executor.execute(self._plan(1, decoding, drafts, specs)).result().sequences]
        num_left = self.num_rows - num_decoding - num_reading
        planned = []
        for i in range(num_decoding):
            drafts[i] = drafts[i].first(min(num_left, len(drafts[i])))
            num_left -= len(drafts[i])
            planned.append(self._planned(i, num_tokens, 1, num_draft=len(drafts[i]), draft_limit=num_drafted))
        for i in range(num_decoding, self.num_sequences):
            num_rows = min(most_read, 1 + num_left)
            num_left -= num_rows - 1
            planned.append(self._planned(i, most_read - num_rows, num_rows, draft_limit=num_drafted))
        plan = self._plan(2, planned, [*drafts, *[NO_DRAFT] * num_reading], specs)
        executor.execute(plan).result()
        return len(plan.rows.token_ids)

    def _spec(self, seq_id: int, num_tokens: int) -> SequenceSpec:
        return SequenceSpec(
            seq_id=seq_id, prompt_ids=[0] * num_tokens, sampling=SAMPLING, seed=0, max_length=max(self.longest, 3)
        )

    def _planned(
        self, seq_id: int, start: int, num_tail: int, *, draft_limit: int, num_draft: int = 0
    ) -> PlannedSequence:
        end = start + num_tail + num_draft
        return PlannedSequence(
            seq_id=seq_id,
            start=start,
            num_tail=num_tail,
            reaches_end=True,
            num_draft=num_draft,
            draft_limit=draft_limit,
            end=end,
            blocks=np.zeros(-(-end // self.block_size), dtype=np.int32),
        )

    def _plan(
        self,
        number: int,
        sequences: list[PlannedSequence],
        drafts: Listing[Draft],
        specs: list[SequenceSpec],
    ) -> StepPlan:
        tails = [[0] * planned.num_tail for planned in sequences]
        return StepPlan(
            sequences=sequences,
            rows=lay_out(sequences, tails, drafts, block_size=self.block_size),
            block_size=self.block_size,
            number=number,
            new=specs,
        )
