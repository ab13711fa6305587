"""An executor that computes nothing: tokens from a hash or a recording, times from a function of the plan, in virtual time.

Engine, scheduler, KV accounting, prefix cache, stop rules and statistics run as they are, thousands of
steps a second: for planning capacity, and for testing policy without a model. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

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
from forerun.executor.simulated_text import Drafting, HashedTexts, Texts
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


class DraftSeconds(Protocol):
    """How long a step's drafting takes."""

    def __call__(self, plan: StepPlan, num_draft_tokens: int) -> float:
        """Seconds to draft `num_draft_tokens` in all, after the step of `plan`; called only where a draft was asked for."""
        ...


def drafting_is_free(plan: StepPlan, num_draft_tokens: int) -> float:  # noqa: ARG001 - the signature is `DraftSeconds`
    """Drafting takes no time."""
    return 0.0


@dataclass(slots=True)
class _State:
    """One sequence: how much of its text there is, and the draft for its next step."""

    spec: SequenceSpec
    num_tokens: int  # prompt included
    right_nodes: tuple[int, ...] = ()  # of its draft, from the root down
    has_ended: bool = False


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
        drafting: Drafting | None = None,
        draft_seconds: DraftSeconds = drafting_is_free,
        texts: Texts | None = None,
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
        for name in ("logprobs", "prompt_logprobs", "constraint"):
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
            if self._drafting is not None and result.token_ids and not state.has_ended:
                depth = min(planned.draft_limit, state.spec.max_length - state.num_tokens - 1)
                if depth > 0:
                    result.draft = self._draft(self._drafting, state, planned, depth)
                    num_asked += 1
                    num_drafted += len(result.draft.token_ids)
            results.append(result)
        if num_asked:
            times.draft = self._draft_seconds(plan, num_drafted)
        self._clock.advance(times.forward + times.draft)
        return ReadyResult(StepResult(sequences=results, times=times))

    def write(self, seq_id: int, num_tokens: int) -> list[int]:
        """The next tokens of a sequence that decodes without drafts, written as by so many steps; none of them ends its text."""
        state = self._states[seq_id]
        first = state.num_tokens
        state.num_tokens += num_tokens
        return self._texts.tokens(state.spec, first, state.num_tokens)

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
        accepted = state.right_nodes
        if accepted and accepted[-1] >= planned.num_draft:
            accepted = tuple([node for node in accepted if node < planned.num_draft])
        spec, first = state.spec, state.num_tokens
        token_ids = self._texts.tokens(spec, first, first + len(accepted) + 1)
        num_output = first - len(spec.prompt_ids)
        if spec.may_end(num_output, token_ids):
            state.has_ended = any(spec.ends(num_output + i + 1, token_id) for i, token_id in enumerate(token_ids))
        state.num_tokens += len(token_ids)
        state.right_nodes = ()
        return SequenceResult(accepted=accepted, token_ids=token_ids)

    def _draft(self, drafting: Drafting, state: _State, planned: PlannedSequence, depth: int) -> Draft:
        """The draft for the next step: on the text's path its own tokens, elsewhere wrong ones."""
        spec, first = state.spec, state.num_tokens
        shape, state.right_nodes = drafting.draft(
            spec, first, limit=planned.draft_limit, depth=depth, min_survival=planned.min_survival
        )
        if not shape.num_nodes:
            return NO_DRAFT
        right = state.right_nodes
        path = self._texts.tokens(spec, first, first + len(right) + 1)
        token_ids = [(path[-1] + 1) % self._vocab_size] * shape.num_nodes
        for node, token_id in zip(right, path, strict=False):
            token_ids[node] = token_id
        return Draft(tuple(token_ids), shape.parents, None, shape.source, shape.survival)
