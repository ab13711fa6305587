"""What a drafter drafts in a simulation: a real drafter at work on recorded texts; and the time of one that is not at work."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from forerun.bench.instruments import Clock
from forerun.bench.recording import RecordedText
from forerun.bench.replay import StepsClock, rows_on_path, standing_nodes
from forerun.bench.tuning.target_rows import TargetRows
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence as TokenSequence
from forerun.core.step import SequenceSpec, StepPlan
from forerun.drafters.base import DraftRequest, VerifiedRows
from forerun.drafters.guard import GuardedDrafter
from forerun.executor.simulated_text import NOTHING_DRAFTED, Drafted, DraftShape


class ReplayedDrafting:
    """A real drafter, asked wherever a simulation comes to, on the texts that the simulated target repeats.

    Under matching the text decides what stands of a draft, so its fate here is that of a real run. The drafter sees
    the texts in the simulation's order, batches included, and remembers ended ones as it would in an engine. One that
    learns from the target is shown the recorded candidates of the rows on the text's path, and of drafted tokens that
    did not stand those that `rows` has for the same tokens.
    The time of drafting is measured: called as a `DraftSeconds`, the object gives what has passed since its last call.
    A drafter that goes by a clock sees the simulation's steps pass, and its own drafts in real time.

    Args:
        drafting: the drafter.
        texts: by the seeds that their requests are sent with.
        rows: what the target said after drafted tokens, while it was recorded.
        salt: of all requests.
        clock: times the drafter; by default it counts this thread's processor time, whatever else runs.
    """

    def __init__(
        self,
        drafting: GuardedDrafter,
        texts: Mapping[int | None, RecordedText],
        *,
        rows: TargetRows,
        salt: str | None = None,
        clock: Clock = time.thread_time,
    ) -> None:
        self._drafting = drafting
        self._texts = texts
        self._rows = rows
        self._salt = salt
        self._clock = StepsClock(clock)
        drafting.use_clock(self._clock)
        self._sequences: dict[int | None, TokenSequence] = {}  # by seed
        self._drafts: dict[int | None, Draft] = {}  # by seed: the last one
        self._num_verified: dict[int, int] = {}  # by seq_id: the nodes of it that the last step verified
        self._seconds = 0.0
        self._num_to_ask = 0  # sequences that are drafted for after the step, about
        self._step_seconds = 0.0  # of steps, that have not passed on the clock

    def note_plan(self, plan: StepPlan, seconds: float) -> None:
        """Take in how much of each draft a step verifies, and how long it takes, before the step is judged."""
        self._num_verified = {planned.seq_id: planned.num_draft for planned in plan.sequences}
        self._num_to_ask = sum(planned.draft_limit > 0 for planned in plan.sequences)
        self._step_seconds += seconds

    def __call__(self, num_sequences: int, num_draft_tokens: int) -> float:  # noqa: ARG002 - the signature is `DraftSeconds`
        """See `DraftSeconds`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def draft(self, spec: SequenceSpec, position: int, *, limit: int, depth: int, min_survival: float) -> Drafted:
        """See `Drafting`."""
        self._pass_share()
        seed = spec.sampling.seed
        text = self._texts[seed]
        sequence = self._sequences.get(seed)
        if sequence is None:
            sequence = self._sequences[seed] = TokenSequence(
                seq_id=spec.seq_id,
                prompt_ids=text.prompt_ids,
                output_ids=[],
                sampling=spec.sampling,
                seed=spec.seed,
                cache_salt=self._salt,
            )
        start = self._clock()
        self._catch_up(sequence, text, position - len(text.prompt_ids))
        request = DraftRequest(sequence, limit, depth, min_survival=min_survival)
        (draft,) = self._drafting.propose([request], {})
        self._seconds += self._clock() - start
        self._drafts[seed] = draft
        if not draft.token_ids:
            return NOTHING_DRAFTED
        shape = DraftShape(len(draft), draft.parents, draft.survival, draft.source)
        return Drafted(shape, standing_nodes(draft, text.answer_ids, len(sequence.output_ids)))

    def _pass_share(self) -> None:
        """Let a sequence's share of the step's time pass: an engine asks for all at once, a simulation for one after the other."""
        share = self._step_seconds / max(1, self._num_to_ask)
        self._step_seconds -= share
        self._num_to_ask -= 1
        self._clock.passed += share

    def end(self, seed: int) -> None:
        """A text has ended: the drafter may remember it."""
        sequence = self._sequences.pop(seed, None)
        if sequence is not None:
            self._drafts.pop(seed, None)
            sequence.output_ids[:] = self._texts[seed].answer_ids
            self._drafting.stop(sequence)

    def _catch_up(self, sequence: TokenSequence, text: RecordedText, num_output: int) -> None:
        """Commit what has been written since the last call, and let the drafter learn from its rows."""
        num_new = num_output - len(sequence.output_ids)
        rows = None
        if self._drafting.num_candidates and num_new:
            rows = self._verified_rows(sequence, text, num_new)
        sequence.output_ids += text.answer_ids[len(sequence.output_ids) : num_output]
        if rows is not None:
            self._drafting.learn(rows)
        self._drafting.start(sequence)

    def _verified_rows(self, sequence: TokenSequence, text: RecordedText, num_new: int) -> VerifiedRows:
        """The rows of the last step: those on the text's path, and those of drafted tokens that did not stand."""
        size, done = self._drafting.num_candidates, len(sequence.output_ids)
        on_path = rows_on_path(text, sequence, num_new - 1, num_candidates=size)
        draft = self._drafts.pop(sequence.sampling.seed, NO_DRAFT).first(self._num_verified.get(sequence.seq_id, 0))
        stood = set(standing_nodes(draft, text.answer_ids, done)) if len(draft) else set()
        last = sequence.tokens_from(len(sequence) - 1)[0]
        keys, found = [], []
        for node, token_id in enumerate(draft.token_ids):
            parent = draft.parent(node)
            key = (last if parent < 0 else draft.token_ids[parent], token_id)
            candidates = None if node in stood else self._rows.after(*key)
            if candidates is not None and len(candidates.ids) >= size:
                keys.append(key)
                found.append(candidates)
        if not keys:
            return on_path
        previous_ids, token_ids = np.array(keys, dtype=np.int64).T
        return VerifiedRows(
            token_ids=np.concatenate([on_path.token_ids, token_ids]),
            previous_ids=np.concatenate([on_path.previous_ids, previous_ids]),
            candidate_ids=np.concatenate([on_path.candidate_ids, [one.ids[:size] for one in found]]),
            candidate_logits=np.concatenate([on_path.candidate_logits, [one.logits[:size] for one in found]]),
            salts=[(0, len(on_path) + len(keys), sequence.cache_salt)],
        )


class ProbedDraftSeconds:
    """How long a drafter with a model drafts: as long for each sequence as a short real run showed.

    Not by its tokens: of what is drafted a real run counts only what it verifies.
    """

    def __init__(self, seconds_per_draft: float) -> None:
        self._seconds_per_draft = seconds_per_draft

    def __call__(self, num_sequences: int, num_draft_tokens: int) -> float:  # noqa: ARG002 - the signature is `DraftSeconds`
        """See `DraftSeconds`."""
        return self._seconds_per_draft * num_sequences
