"""What the device computes in a step by itself: what it reads and writes, and the functions in their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import Candidates, ForwardBatch, ForwardResult, SequenceRows
from forerun.core.step import PlannedSequence
from forerun.drafters.base import Drafter
from forerun.drafters.device_chains import DraftsOnDevice
from forerun.errors import DeviceLostError
from forerun.executor.device_ngrams import AskedDrafts, DeviceNgrams
from forerun.executor.device_results import pack
from forerun.executor.device_slots import DeviceSlots
from forerun.kv.cache import KVCache
from forerun.models.base import TargetModel
from forerun.ops.attention import Attend, Attention
from forerun.ops.cuda.failures import device_failure
from forerun.ops.cuda.functions import modules_for
from forerun.ops.cuda.table import DevicePlan, StepRows, Verdicts


class DeviceFunctions(NamedTuple):
    """The parts of a step beside the layers: by formula (`ops.cuda`), or as Triton kernels (`ops.cuda.kernels`)."""

    place: Callable[..., None]
    prepare: Callable[..., None]
    edit: Callable[..., None]
    sample: Callable[..., None]
    match: Callable[..., None]
    move: Callable[..., None]
    commit: Callable[..., None]
    propose: Callable[..., None]

    @classmethod
    def choose(cls, device: torch.device) -> DeviceFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Raises:
            ConfigError: triton is not installed.
        """
        edits, ngram, sampling, steps = modules_for(device, "edits", "ngram", "sampling", "steps")
        return cls.of(edits=edits, ngram=ngram, sampling=sampling, steps=steps)

    @classmethod
    def of(cls, *, edits: Any, ngram: Any, sampling: Any, steps: Any) -> DeviceFunctions:
        """Those of four modules of one kind."""
        return cls(
            *(steps.place, steps.prepare, edits.edit, sampling.sample, steps.match, steps.move, steps.commit),
            ngram.propose,
        )


@runtime_checkable
class AttendsToRows(Protocol):
    """Attention that needs no host: rows lie on the device as the device laid them out, padding among them."""

    def begin_step(self, rows: StepRows, block_table: Tensor, cache: KVCache) -> Attend:
        """Prepare what all layers of one pass share."""
        ...


logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int32]

PLAN_FIELDS = 6
"""Numbers that the host sends of each sequence of a step, see `plan_values`."""


def plan_values(sequences: Sequence[PlannedSequence], slots: Sequence[int], drafts_on_device: Sequence[bool]) -> Ints:
    """What the host sends of a step's sequences, [PLAN_FIELDS, N]: `DevicePlan`, then `AskedDrafts`."""
    values = [
        (
            slot if planned.num_tail else -1,
            planned.num_tail,
            planned.num_draft,
            planned.reaches_end,
            slot if is_own and planned.reaches_end and planned.num_tail and planned.draft_limit else -1,
            planned.draft_limit,
        )
        for planned, slot, is_own in zip(sequences, slots, drafts_on_device, strict=True)
    ]
    return np.array(values, dtype=np.int32).T


def most_asked_of(values: Ints) -> int:
    """Tokens of the longest draft that the device is asked for, of what `plan_values` gives; 0: it is asked for none."""
    return max((limit for slot, limit in values[-2:].T.tolist() if slot >= 0), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What the device reads and writes in one step, of N sequences, T rows, and R rows after which a token is drawn."""

    plan: DevicePlan
    asked: AskedDrafts
    rows: StepRows
    verdicts: Verdicts
    masks: Tensor | None = None  # [R, W] bit masks of grammars and bad words
    has_mask: Tensor | None = None  # [R] int32; None where `masks` is

    @classmethod
    def of_plan(
        cls,
        values: Tensor,
        *,
        rows: StepRows,
        verdicts: Verdicts,
        masks: Tensor | None = None,
        has_mask: Tensor | None = None,
    ) -> StepTensors:
        """Those of a plan as `plan_values` has it."""
        slots, tails, most_drafted, ends, asked, limits = values.unbind()
        plan = DevicePlan(slots=slots, tails=tails, most_drafted=most_drafted, ends=ends)
        return cls(
            plan=plan,
            asked=AskedDrafts(asked, limits),
            rows=rows,
            verdicts=verdicts,
            masks=masks,
            has_mask=has_mask,
        )


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What the device gives in one step."""

    packed: Tensor  # see `pack`
    candidates: Candidates | None  # of rows with logits
    logits: Tensor | None  # [R + P, V], first of judged rows, then of prompts; None where nobody reads them


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """What the host says of a step's rows, where it knows them exactly."""

    sequences: list[SequenceRows]  # for attention that cannot read them on the device
    prompt_logits: Tensor  # [P] int64, rows whose logits are wanted beside those after which a token is drawn


class DeviceComputation:
    """Lays out rows, computes the model, draws, matches, moves KV, commits and drafts, without a word from the host.

    What it does depends on no value that the host has, but for the sizes of its tensors.

    Args:
        model: the target.
        attention: how it attends to the cache.
        cache: keys, values and features.
        slots: the tables.
        compute: the functions.
        drafter: drafts on the device what it can draft there.
        features: hidden states of the target to be kept.
        num_candidates: that are found for each row with logits.
    """

    def __init__(
        self,
        *,
        model: TargetModel,
        attention: Attention,
        cache: KVCache,
        slots: DeviceSlots,
        compute: DeviceFunctions,
        drafter: Drafter,
        features: frozenset[str],
        num_candidates: int,
    ) -> None:
        self.compute = compute
        self._model = model
        self._attention = attention
        self._cache = cache
        self._table = slots.table
        self._rules = slots.rules
        self._features = features
        self._num_candidates = num_candidates
        self.use_drafter(drafter)

    @property
    def needs_host_rows(self) -> bool:
        """Whether nothing can be computed before the host knows each row."""
        return not isinstance(self._attention, AttendsToRows)

    def run(self, step: StepTensors, host: HostRows | None, *, has_trees: bool, most_asked: int) -> StepOutputs:
        """Compute a step.

        Args:
            step: tensors that nothing else uses meanwhile.
            host: None where the host does not know the rows; its tensors may then be padded.
            has_trees: whether a draft may be a tree.
            most_asked: tokens of the longest draft that the device is asked for; 0: it drafts nothing.
        """
        compute, table = self.compute, self._table
        compute.prepare(step.plan, table, step.rows, block_size=self._cache.block_size)
        forward = self.forward(*self._begin(step.rows, host))
        if forward.features:
            self._keep(step.rows, forward.features)
        largest = self._judge(step, forward.logits[: len(step.rows.judged)])
        if has_trees:
            for entries in self._cache.stacks:
                compute.move(step.plan, step.rows, step.verdicts, entries)
        compute.commit(step.plan, table, self._rules, step.verdicts)
        drafted = self._draft(step, most_asked) if most_asked else None
        return StepOutputs(pack(step.verdicts, largest, drafted), forward.candidates, forward.logits)

    @property
    def drafts(self) -> bool:
        """Whether the device can draft."""
        return self.ngrams is not None or self.chains is not None

    @property
    def always_drafts(self) -> bool:
        """Whether drafting for nobody costs nothing, so that steps with drafts and without are the same: looking up does."""
        return self.ngrams is not None

    @property
    def drafts_trees(self) -> bool:
        """Whether what the device drafts may be trees."""
        return self.chains is not None and self.chains.writes_trees

    def use_drafter(self, drafter: Drafter) -> None:
        """Draft what this drafter would, where the device can."""
        table, rules = self._table, self._rules
        self.ngrams = DeviceNgrams.of(drafter, table, rules, self.compute.propose)
        self.chains = (
            drafter.on_device(table, rules, self.compute.sample) if isinstance(drafter, DraftsOnDevice) else None
        )

    def _draft(self, step: StepTensors, most_asked: int) -> Tensor | None:
        """Draft for the sequences that are asked for: see `AskedDrafts.drafts`; None where that failed."""
        table, asked = self._table, step.asked
        if self.ngrams is not None:
            self.ngrams.propose(asked)
            return asked.drafts(table)
        assert self.chains is not None, "one of the two drafts"
        num_computed = table.computed[asked.slots.clamp(min=0).long()] - step.plan.tails - step.verdicts.num_accepted
        depths = asked.rooms(table, self._rules) * (step.verdicts.num_tokens > 0)
        try:
            self.chains.propose(
                asked.slots, asked.limits, depths, num_computed, self._cache.features, most_tokens=most_asked
            )
        except Exception as error:  # the tokens stand; that there are no drafts costs time only
            is_recorded = table.tokens.is_cuda and torch.cuda.is_current_stream_capturing()
            if isinstance(device_failure(error), DeviceLostError) or is_recorded:
                raise  # what cannot be recorded may well be computed
            logger.exception(
                "drafting on the device failed; from now on the host asks the drafter, the text is not affected"
            )
            self.chains = None
            table.draft_sizes[asked.slots[asked.slots >= 0].long()] = 0  # of which the host will not hear
            return None
        return asked.drafts(table)

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute the model."""
        return self._model.forward(batch, attend)

    def _keep(self, rows: StepRows, features: Mapping[str, Tensor]) -> None:
        """Store features that the layers have not stored themselves, where the rows' keys and values lie."""
        real = rows.kv_slots >= 0
        self._cache.keep(rows.kv_slots[real], {name: values[real] for name, values in features.items()})

    def _begin(self, rows: StepRows, host: HostRows | None) -> tuple[ForwardBatch, Attend]:
        """The batch of a pass over the rows, and its attention."""
        logits_rows = rows.judged.clamp(min=0).long()
        batch = ForwardBatch(
            token_ids=rows.tokens.long(),
            positions=rows.positions.long(),
            slot_mapping=rows.kv_slots,
            sequences=[] if host is None else host.sequences,
            block_size=self._cache.block_size,
            logits_rows=logits_rows if host is None else torch.cat([logits_rows, host.prompt_logits]),
            features=self._features,
            num_candidates=self._num_candidates,
        )
        if isinstance(self._attention, AttendsToRows):
            return batch, self._attention.begin_step(rows, self._table.block_table, self._cache)
        return batch, self._attention.begin(batch, self._cache)

    def _judge(self, step: StepTensors, logits: Tensor) -> Tensor:
        """Draw a token after each judged row, from logits [R, V], and walk down the drafts.

        Returns:
            The largest logit [N] where the first token of each sequence was drawn.
        """
        compute, rows, num_judged = self.compute, step.rows, len(step.rows.judged)
        num_rows, num_sequences = len(rows.slots), len(step.plan.slots)
        sampled = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=logits.device)
        if not num_judged:
            compute.match(step.plan, self._table, rows, sampled[:num_rows], step.verdicts)
            return torch.zeros(num_sequences, device=logits.device)
        logits, seen = logits.clone(), judged_rows(rows)  # edits are made in place
        token_ids, largest = torch.full_like(seen.slots, -1), torch.zeros(num_judged, device=logits.device)
        compute.edit(logits, seen, self._table, self._rules, row_masks=step.masks, has_row_mask=step.has_mask)
        compute.sample(logits, seen, self._rules, token_ids, largest)
        sampled[_places(rows)] = token_ids
        compute.match(step.plan, self._table, rows, sampled[:num_rows], step.verdicts)
        return largest[rows.first_judged[:-1].clamp(max=num_judged - 1).long()]


def judged_rows(rows: StepRows) -> StepRows:
    """The judged rows alone [R], as edits and sampling read them; a parent that is not among them is -1."""
    at, num_rows = rows.judged.clamp(min=0).long(), len(rows.slots)
    # two more places: one where padding leads, one where the parent -1 does, which is nobody
    place = torch.full((num_rows + 2,), -1, dtype=torch.int32, device=at.device)
    place[_places(rows)] = torch.arange(len(at), dtype=torch.int32, device=at.device)
    return replace(
        rows,
        tokens=rows.tokens[at],
        positions=rows.positions[at],
        slots=rows.slots[at].masked_fill(rows.judged < 0, -1),
        parents=place[rows.parents[at].long()],
    )


def _places(rows: StepRows) -> Tensor:
    """[R] int64: the judged rows, and one place behind all rows for padding."""
    return rows.judged.long().masked_fill(rows.judged < 0, len(rows.slots))
