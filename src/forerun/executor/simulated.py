"""An executor that computes nothing: tokens from a hash or a recording, times from a function of the plan, in virtual time.

Engine, scheduler, KV accounting, prefix cache, stop rules and statistics run as they are, thousands of
steps a second: for planning capacity, and for testing policy without a model. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.stats import StepTimes
from forerun.core.step import (
    EndedSequence,
    PlannedSequence,
    ReadyResult,
    SequenceResult,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from forerun.errors import RequestError
from forerun.executor.simulated_text import NOTHING_DRAFTED, Drafted, Drafting, HashedTexts, Texts
from forerun.kv.transfer import BlockContents


class VirtualClock:
    """Seconds that pass only where a simulated step takes them; an engine's `clock`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


DraftSeconds = Callable[[int, int], float]
"""Seconds to draft for so many sequences, after a step, so many tokens in all; called only where a draft was asked for."""


def drafting_is_free(num_sequences: int, num_draft_tokens: int) -> float:  # noqa: ARG001 - the signature is `DraftSeconds`
    """Drafting takes no time."""
    return 0.0


@dataclass(slots=True)
class _State:
    """One sequence: how much of its text there is, and the draft for its next step."""

    spec: SequenceSpec
    num_tokens: int  # prompt included
    drafted: Drafted = NOTHING_DRAFTED
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """What steps to come give one sequence, if each verifies all of its draft: S of them, the last perhaps its end.

    `lengths` [S + 1] are the tokens of its text before each step and after the last, `drafted` [S + 1] the drafts
    that each verifies and the one for the step after, `num_drafted` [S + 1] their nodes.
    """

    lengths: Sequence[int]
    drafted: Sequence[Drafted]
    num_drafted: Sequence[int]


class SimulatedExecutor:
    """Writes texts that depend on the request alone, whatever is drafted.

    Args:
        vocab_size: tokens are below it.
        step_seconds: what a plan's step takes, drafting left out.
        clock: goes on by that and by the time of drafting.
        drafting: what is drafted, and what of it is right; None: nothing is.
        draft_seconds: what drafting takes.
        texts: what the target writes; None: tokens from a hash.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        step_seconds: Callable[[StepPlan], float],
        clock: VirtualClock,
        drafting: Drafting | None,
        draft_seconds: DraftSeconds,
        texts: Texts | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._clock = clock
        self._drafting = drafting
        self._draft_seconds = draft_seconds
        self._texts = HashedTexts(vocab_size) if texts is None else texts
        self._states: dict[int, _State] = {}

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`; log probabilities and grammars are refused, since there are no logits."""
        sampling = spec.sampling
        for name in ("logprobs", "prompt_logprobs", "structured_outputs"):
            if getattr(sampling, name) is not None:
                raise RequestError(f"{name}: a simulation has no logits; leave it out")
        self._states[spec.seq_id] = _State(spec, len(spec.prompt_ids) + len(spec.output_ids))

    def execute(self, plan: StepPlan) -> ReadyResult:
        """See `Executor`."""
        for spec in plan.new:
            if spec.seq_id not in self._states:
                self.prepare(spec)
        times = StepTimes(forward=self._step_seconds(plan), num_steps=1)
        results: list[SequenceResult] = []
        num_asked = num_drafted = 0
        for planned in plan.sequences:
            state = self._states[planned.seq_id]
            result = self._judge(state, planned, plan.block_size)
            if (
                result.token_ids
                and not state.has_ended
                and self.is_asked(state.spec, state.num_tokens, planned.draft_limit)
            ):
                state.drafted = self._drafted(state.spec, state.num_tokens, planned.draft_limit, planned.min_survival)
                result.draft = self._draft(state)
                num_asked += 1
                num_drafted += len(result.draft.token_ids)
            results.append(result)
        if num_asked:
            times.draft = self._draft_seconds(num_asked, num_drafted)
        self._clock.advance(times.forward + times.draft)
        return ReadyResult(StepResult(sequences=results, times=times))

    def look_ahead(self, seq_id: int, num_steps: int, *, draft_limit: int) -> StepsAhead:
        """What the next steps give a sequence that decodes, up to the one that ends it; no more than its length may end it.

        Args:
            seq_id: the sequence.
            num_steps: the most steps.
            draft_limit: the most nodes that are drafted after each.
        """
        state = self._states[seq_id]
        spec, length = state.spec, state.num_tokens
        if not draft_limit and state.drafted is NOTHING_DRAFTED:
            num_steps = min(num_steps, spec.max_length - length)
            return StepsAhead(
                range(length, length + num_steps + 1), [NOTHING_DRAFTED] * (num_steps + 1), [0] * (num_steps + 1)
            )
        drafted, most = state.drafted, spec.max_length
        lengths, drafts, sizes = [length], [drafted], [drafted.shape.num_nodes]
        while len(lengths) <= num_steps and length < most:
            length += len(drafted.right) + 1
            drafted = self._drafted(spec, length, draft_limit, 0.0)
            lengths.append(length)
            drafts.append(drafted)
            sizes.append(drafted.shape.num_nodes)
        return StepsAhead(lengths, drafts, sizes)

    def take(self, seq_id: int, ahead: StepsAhead, num_steps: int) -> tuple[list[int], Draft]:
        """Take the first of these steps: the tokens that they give, and the draft for the step after."""
        state = self._states[seq_id]
        first, state.num_tokens, state.drafted = state.num_tokens, ahead.lengths[num_steps], ahead.drafted[num_steps]
        state.has_ended = state.num_tokens >= state.spec.max_length
        return self._texts.tokens(state.spec, first, state.num_tokens), self._draft(state)

    def as_in_a_step(self) -> AbstractContextManager[None]:
        """See `Executor`; a simulation sets up nothing."""
        return nullcontext()

    def read_blocks(
        self,
        blocks: Sequence[int],  # noqa: ARG002
        digests: Sequence[bytes],  # noqa: ARG002
    ) -> tuple[BlockContents, ...]:
        """See `Executor`; nothing lies in the blocks of a simulation."""
        return ()

    def write_blocks(
        self, blocks: Sequence[int], digests: Sequence[bytes], caches: Sequence[BlockContents], *, first: int
    ) -> None:
        """See `Executor`; nothing lies in the blocks of a simulation."""

    def check_health(self) -> None:
        """See `Executor`; nothing can end here."""

    def release(self, ended: Sequence[EndedSequence]) -> None:
        """See `Executor`."""
        for one in ended:
            self._states.pop(one.seq_id, None)

    def _judge(self, state: _State, planned: PlannedSequence, block_size: int) -> SequenceResult:
        """What a step gives one sequence, the draft for the next one aside."""
        if not planned.reaches_end or state.has_ended:
            return SequenceResult()
        assert planned.is_pending or planned.start + planned.num_tail == state.num_tokens, "the plan has all tokens"
        assert state.num_tokens + planned.num_draft <= planned.end <= len(planned.blocks) * block_size, "no place"
        accepted = state.drafted.right
        if accepted and accepted[-1] >= planned.num_draft:
            accepted = tuple([node for node in accepted if node < planned.num_draft])
        spec, first = state.spec, state.num_tokens
        token_ids = self._texts.tokens(spec, first, first + len(accepted) + 1)
        num_output = first - len(spec.prompt_ids)
        if spec.may_end(num_output, token_ids):
            state.has_ended = any(spec.ends(num_output + i + 1, token_id) for i, token_id in enumerate(token_ids))
        state.num_tokens += len(token_ids)
        state.drafted = NOTHING_DRAFTED
        return SequenceResult(accepted=accepted, token_ids=token_ids)

    def is_asked(self, spec: SequenceSpec, num_tokens: int, draft_limit: int) -> bool:
        """Whether a draft is asked for after so many tokens of a text: not where the answer could use no token of it."""
        return self._drafting is not None and draft_limit > 0 and num_tokens + 1 < spec.max_length

    def num_asked(self, spec: SequenceSpec, lengths: Sequence[int], draft_limit: int) -> int:
        """After how many of a text's growing lengths a draft is asked for: the first so many."""
        count = len(lengths)
        while count and not self.is_asked(spec, lengths[count - 1], draft_limit):
            count -= 1
        return count

    def _drafted(self, spec: SequenceSpec, num_tokens: int, draft_limit: int, min_survival: float) -> Drafted:
        """What is drafted after so many tokens of a text."""
        if self._drafting is None or not self.is_asked(spec, num_tokens, draft_limit):
            return NOTHING_DRAFTED
        depth = min(draft_limit, spec.max_length - num_tokens - 1)
        return self._drafting.draft(spec, num_tokens, limit=draft_limit, depth=depth, min_survival=min_survival)

    def _draft(self, state: _State) -> Draft:
        """The draft for the next step: on the text's path its own tokens, elsewhere wrong ones."""
        shape, right = state.drafted
        if not shape.num_nodes:
            return NO_DRAFT
        path = self._texts.tokens(state.spec, state.num_tokens, state.num_tokens + len(right) + 1)
        token_ids = [(path[-1] + 1) % self._vocab_size] * shape.num_nodes
        for node, token_id in zip(right, path, strict=False):
            token_ids[node] = token_id
        return Draft(tuple(token_ids), shape.parents, None, shape.source, shape.survival)
