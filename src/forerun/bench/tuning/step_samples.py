"""Measures what a step takes, by sequences, drafted rows and prompt rows: real steps of an engine, host included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.bench.compare import make_engine
from forerun.bench.instruments import Progress
from forerun.bench.tuning.requests import TuningWorkload
from forerun.config.settings import EngineSettings
from forerun.core.draft import Draft
from forerun.core.sequence import Sequence as TokenSequence
from forerun.core.step import StepRecord
from forerun.drafters.base import DraftContext, TargetInfo
from forerun.engine.engine import Engine
from forerun.engine.speculation import SpeculationReport
from forerun.models.base import LoadedTarget
from forerun.plan.step_times import StepSample
from forerun.plan.tuning.candidates import BatchLimits
from forerun.plan.tuning.drive import OfferedRequest, drive

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFT_LENGTHS = (16, 12, 8, 5, 3, 2, 1, 0)  # the longest first, while an answer has room for it
MOST_ROWS = 384
"""Rows of a step that are measured; beyond them costs go on in a straight line."""

NUM_STEPS = 25  # of a batch in a round, the one that reads the prompts included
NUM_PROMPTS = 4  # that are read alone in a round
NUM_ROUNDS = 2


class FillingDrafter:
    """Drafts as much as it may, always the same token: rows for a measurement, none of which is expected to stand."""

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo) -> None:
        self._target = target

    def start(self, sequence: TokenSequence) -> None:
        """Do nothing: no state is kept."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a full chain for each request."""
        return [Draft((0,) * min(request.max_tokens, request.max_depth)) for request in context.requests]

    def stop(self, sequence: TokenSequence) -> None:
        """Do nothing: no state was kept."""


FILLING: dict[str, Any] = {"method": FillingDrafter, "num_speculative_tokens": DRAFT_LENGTHS[0]}


@dataclass(slots=True)
class VariedLengths:
    """A `SpeculationControl` that drafts each of several lengths in turn, and notes what each step was."""

    lengths: Sequence[int] = DRAFT_LENGTHS
    records: list[StepRecord] = field(default_factory=list)
    _next: int = 0
    num_speculative_tokens: int = DRAFT_LENGTHS[0]
    min_survival: float = 0.0

    def draft_limit(self, batch_size: int) -> int:
        """The next length, no more than `MOST_ROWS` allow."""
        length = self.lengths[self._next % len(self.lengths)]
        self._next += 1
        return min(length, max(0, MOST_ROWS // max(1, batch_size) - 1))

    def choose(
        self,
        drafts: Sequence[Draft],
        *,
        num_rows: int,  # noqa: ARG002 - the signature is that of all controls
        num_sequences: int,  # noqa: ARG002
        num_context_tokens: int,  # noqa: ARG002
    ) -> list[int]:
        """All of each draft."""
        return [len(draft.token_ids) for draft in drafts]

    def observe(self, record: StepRecord) -> None:
        """Note the step."""
        self.records.append(record)

    def report(self) -> SpeculationReport | None:
        """None: nothing is chosen."""
        return None


def batch_sizes(most: int) -> list[int]:
    """The batch sizes that are measured where up to `most` sequences run."""
    return [size for size in BATCH_SIZES if size < most] + [most]


def measure_steps(
    target: LoadedTarget,
    settings: EngineSettings,
    workload: TuningWorkload,
    limits: BatchLimits,
    progress: Progress,
) -> list[StepSample]:
    """Time steps of every batch size that the load can bring, with drafts of each length, in rounds.

    Args:
        target: the model.
        settings: of the engine.
        workload: its prompts are read, and so give the contexts.
        limits: of a step.
        progress: is called with the state of the measurement.

    Raises:
        ForerunError: a prompt does not fit.
    """
    most = workload.most_running(limits.max_num_seqs)
    sizes = batch_sizes(most)
    llm = make_engine(
        "measuring steps",
        target,
        replace(settings, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens),
        FILLING,
        num_sequences=most,
        longest=workload.longest + NUM_STEPS,
    )
    samples: list[StepSample] = []
    for number in range(NUM_ROUNDS + 1):  # the first one warms up
        found: list[StepSample] = []
        for prompt in _spread_prompts(workload) if number else ():
            progress(f"step times: round {number} of {NUM_ROUNDS}, a prompt of {len(prompt.prompt_ids)} tokens")
            found += _measure_batch(llm.engine, [prompt], num_tokens=1, salt=f"{number}, {id(prompt)}")
        for size in sizes if number % 2 else sizes[::-1]:
            progress(f"step times: round {number} of {NUM_ROUNDS}, {size} sequence(s)")
            requests = workload.warm_up(len(workload.prompts), 1)
            batch = [requests[place % len(requests)] for place in range(size)]
            found += _measure_batch(llm.engine, batch, num_tokens=NUM_STEPS, salt=f"{number}, {size} at once")
        samples += found if number else []
    return samples


def _spread_prompts(workload: TuningWorkload) -> list[OfferedRequest]:
    """A few prompts, from the shortest to the longest."""
    rising = sorted(workload.warm_up(len(workload.prompts), 1), key=lambda request: len(request.prompt_ids))
    places = {round(number * (len(rising) - 1) / (NUM_PROMPTS - 1)) for number in range(NUM_PROMPTS)}
    return [rising[place] for place in sorted(places)]


def _measure_batch(engine: Engine, batch: Sequence[OfferedRequest], *, num_tokens: int, salt: str) -> list[StepSample]:
    """The steps of one batch: its prompts, then tokens with drafts of each length."""
    control = VariedLengths()
    full = [replace(one, sampling=replace(one.sampling, max_tokens=num_tokens, ignore_eos=True)) for one in batch]
    seconds: list[float] = []
    drive(
        Engine(replace(engine.parts, control=control)),
        full,
        concurrency=len(full),
        salt=salt,
        clock=time.perf_counter,
        wait=time.sleep,
        on_step=seconds.append,
    )
    found = [
        _sample(record, taken, is_alone=len(full) == 1) for record, taken in zip(control.records, seconds, strict=True)
    ]
    return [sample for sample in found if sample is not None]


def _sample(record: StepRecord, seconds: float, *, is_alone: bool) -> StepSample | None:
    """A step as a sample; None where prompts of several sequences were read, whose shares are not known."""
    num_judged = len(record.verified)
    num_drafted = sum(len(draft.token_ids) for draft, _ in record.verified)
    taken = seconds - record.times.draft
    if num_judged and record.num_rows == num_judged + num_drafted:
        return StepSample(
            num_rows=record.num_rows,
            num_sequences=num_judged,
            num_context_tokens=record.num_context_tokens,
            seconds=taken,
            num_draft_tokens=num_drafted,
        )
    if not is_alone:
        return None
    return StepSample(
        num_rows=0,
        num_sequences=0,
        num_context_tokens=0,
        seconds=taken,
        num_prompt_rows=record.num_rows,
        num_prompt_context=record.num_context_tokens,
    )
