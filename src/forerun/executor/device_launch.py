"""A step that was begun on the device: what the host keeps of it until it reads what it gave."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.core.batch import CandidateTensors
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.stats import StepTimes
from forerun.core.step import PlannedSequence, StepPlan, StepResult
from forerun.errors import ForerunError
from forerun.executor.device_computation import StepOutputs
from forerun.executor.device_slots import Holder
from forerun.executor.host_copies import LateCopy, StepSpan, to_device
from forerun.executor.local import PreparedStep, SequenceState
from forerun.executor.row_masks import RowMasks


@dataclass(slots=True, kw_only=True, eq=False)
class Launch:
    """A step that the device has been told to compute, and what the host needs to read what it gave."""

    plan: StepPlan
    states: list[SequenceState]
    step: PreparedStep | None  # None until the host knows the rows
    has_own_drafts: list[bool]  # of each sequence: whether the device drafts for it
    refused: dict[int, ForerunError]  # why rules gave no answer, by the sequence's place in the step
    holders: list[Holder]
    copy: LateCopy
    outputs: StepOutputs
    times: StepTimes
    span: StepSpan
    before: StepSpan | None  # of the step that this one follows, if sequences were waiting for it
    is_wanted_first: bool  # no other step is begun before this one was read
    lengths: list[int] = field(default_factory=list)  # of the outputs before reading began to commit; empty until then
    result: StepResult | None = None


def known_drafts(sequences: Listing[PlannedSequence], states: Listing[SequenceState]) -> list[Draft]:
    """The drafts of a step that the host knows: those of pending sequences are on the device."""
    return [
        NO_DRAFT if planned.is_pending or not planned.num_draft else state.draft.first(planned.num_draft)
        for planned, state in zip(sequences, states, strict=True)
    ]


def wants_logits(sequences: Listing[PlannedSequence], states: Listing[SequenceState]) -> bool:
    """Whether the host reads logits of a step, for log probabilities."""
    return any(
        planned.num_prompt_logits or (planned.reaches_end and state.spec.sampling.logprobs is not None)
        for planned, state in zip(sequences, states, strict=True)
    )


def refused_in(step: PreparedStep, masks: RowMasks) -> dict[int, ForerunError]:
    """Why rules gave no answer, by the sequence's place in the step instead of among those that are judged."""
    places = [i for i, first in enumerate(step.rows.first_logits) if first >= 0]
    return {places[i]: error for i, error in masks.refused.items()}


def in_order_of_rows(outputs: StepOutputs, step: PreparedStep) -> StepOutputs:
    """What a step gave first for judged rows, then for the prompts' rows, in the order of `step.rows.logits_rows`."""
    assert outputs.logits is not None, "the logits of prompts are read"
    order: list[int] = []
    judged = 0
    prompt = sum(1 + len(d) for d, first in zip(step.drafts, step.rows.first_logits, strict=True) if first >= 0)
    for planned, draft, first in zip(step.sequences, step.drafts, step.rows.first_logits, strict=True):
        order += range(prompt, prompt + planned.num_prompt_logits)
        prompt += planned.num_prompt_logits
        if first >= 0:
            order += range(judged, judged + 1 + len(draft))
            judged += 1 + len(draft)
    at = to_device(np.array(order, dtype=np.int64), outputs.logits.device)
    found = outputs.candidates
    if found is not None:
        found = CandidateTensors(found.token_ids[at], found.logits[at])
    return replace(outputs, logits=outputs.logits[at], candidates=found)
