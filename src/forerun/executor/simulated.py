"""An executor that computes nothing: tokens from a hash, times from a function of the plan, in virtual time.

Engine, scheduler, KV accounting, prefix cache, stop rules and statistics run as they are, thousands of
steps a second: for planning capacity, and for testing policy without a model. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.random_bits import GAMMA, MASK, UNIT, mix
from forerun.core.stats import StepTimes
from forerun.core.step import EndedSequence, PlannedSequence, SequenceResult, SequenceSpec, StepPlan, StepResult
from forerun.errors import RequestError


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


class Acceptance(Protocol):
    """How good simulated drafts are."""

    def num_right(self, spec: SequenceSpec, position: int, limit: int) -> int:
        """How many tokens of a draft of `limit`, the first of them at `position` of the text, the target would write too."""
        ...


@dataclass(frozen=True, slots=True)
class ConditionalAcceptance:
    """The rate at which a draft's token at each depth is right, given that those before it are.

    Beyond the last rate it stays the same. A draw depends on the sequence's seed and the position alone.
    """

    rates: tuple[float, ...]

    def num_right(self, spec: SequenceSpec, position: int, limit: int) -> int:
        """See `Acceptance`."""
        key, last = spec.seed * GAMMA, len(self.rates) - 1
        for depth in range(limit):
            drawn = (mix(key ^ (position << 16) ^ (depth + 1)) >> 12) * UNIT
            if drawn >= self.rates[min(depth, last)]:
                return depth
        return limit


@dataclass(slots=True)
class _State:
    """One sequence: how much of its text there is, and the draft for its next step."""

    spec: SequenceSpec
    num_tokens: int  # prompt included
    draft: tuple[int, ...] = ()
    num_right: int = 0
    has_ended: bool = False


class SimulatedExecutor:
    """Writes texts that depend on seed and position alone, whatever is drafted.

    Args:
        vocab_size: tokens are below it.
        step_seconds: what a plan's step takes.
        clock: goes on by that.
        acceptance: how good drafts are; None: there are none.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        step_seconds: Callable[[StepPlan], float],
        clock: VirtualClock,
        acceptance: Acceptance | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._clock = clock
        self._acceptance = acceptance
        self._states: dict[int, _State] = {}

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`; log probabilities and grammars are refused, since there are no logits."""
        sampling = spec.sampling
        for name in ("logprobs", "prompt_logprobs", "constraint"):
            if getattr(sampling, name) is not None:
                raise RequestError(f"{name}: a simulation has no logits; leave it out")
        self._states[spec.seq_id] = _State(spec, len(spec.prompt_ids))

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`."""
        for spec in plan.new:
            if spec.seq_id not in self._states:
                self.prepare(spec)
        seconds = self._step_seconds(plan)
        self._clock.advance(seconds)
        results = [self._result(planned, plan.block_size) for planned in plan.sequences]
        return StepResult(sequences=results, times=StepTimes(forward=seconds, num_steps=1))

    def release(self, ended: Sequence[EndedSequence]) -> None:
        """See `Executor`."""
        for one in ended:
            self._states.pop(one.seq_id, None)

    def _result(self, planned: PlannedSequence, block_size: int) -> SequenceResult:
        state = self._states[planned.seq_id]
        if not planned.reaches_end or state.has_ended:
            return SequenceResult()
        assert planned.is_pending or planned.start + planned.num_tail == state.num_tokens, "the plan has all tokens"
        assert state.num_tokens + planned.num_draft <= planned.end <= len(planned.blocks) * block_size, "no place"
        num_accepted = min(state.num_right, planned.num_draft)
        token_ids = list(state.draft[:num_accepted])
        token_ids.append(self._token(state.spec, state.num_tokens + num_accepted))
        num_output = state.num_tokens - len(state.spec.prompt_ids)
        if state.spec.may_end(num_output, token_ids):
            state.has_ended = any(state.spec.ends(num_output + i + 1, token_id) for i, token_id in enumerate(token_ids))
        state.num_tokens += len(token_ids)
        return SequenceResult(
            accepted=tuple(range(num_accepted)), token_ids=token_ids, draft=self._draft(state, planned.draft_limit)
        )

    def _draft(self, state: _State, limit: int) -> Draft:
        """The draft for the next step: the text's own tokens as far as it is right, then wrong ones."""
        spec, position = state.spec, state.num_tokens
        state.draft, state.num_right = (), 0
        limit = min(limit, spec.max_length - position - 1)
        if self._acceptance is None or limit <= 0 or state.has_ended:
            return NO_DRAFT
        num_right = state.num_right = self._acceptance.num_right(spec, position, limit)
        drafted = [self._token(spec, position + depth) for depth in range(min(num_right + 1, limit))]
        if num_right < limit:
            drafted[num_right] = (drafted[num_right] + 1) % self._vocab_size
            drafted += [0] * (limit - len(drafted))
        state.draft = tuple(drafted)
        return Draft(state.draft)

    def _token(self, spec: SequenceSpec, position: int) -> int:
        return mix((spec.seed + position * GAMMA) & MASK) % self._vocab_size
