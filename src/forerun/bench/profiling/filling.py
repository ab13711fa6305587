"""Fills steps with rows for a measurement: drafts of forced lengths, sequences with contexts that were copied."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.passes import RandomSequences
from forerun.core.draft import Draft
from forerun.core.sequence import Sequence as TokenSequence
from forerun.core.step import EndedSequence, ReadyResult, SequenceSpec, StepPlan
from forerun.drafters.base import DraftContext, TargetInfo
from forerun.engine.speculation import VerifiesWholeDrafts
from forerun.executor.base import Executor
from forerun.kv.block_pool import BlockPool
from forerun.kv.prefix_cache import block_digests, root_digest
from forerun.kv.transfer import BlockContents
from forerun.plan.step_times import StepShape


class FillingDrafter:
    """Drafts as much as it may, always the same token: rows for a measurement, few of which stand."""

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


def filling_config(longest: int) -> dict[str, Any] | None:
    """The speculative_config of drafts of up to `longest` tokens; None where that is 0."""
    return {"method": FillingDrafter, "num_speculative_tokens": longest} if longest else None


@dataclass(slots=True)
class LengthsInTurn(VerifiesWholeDrafts):
    """A `SpeculationControl` that drafts each of several lengths in turn."""

    lengths: Sequence[int]
    _next: int = 0

    @property
    def num_speculative_tokens(self) -> int:
        """The longest."""
        return max(self.lengths)

    def draft_limit(self, batch_size: int) -> int:  # noqa: ARG002 - the signature is that of all controls
        """The next length."""
        length = self.lengths[self._next % len(self.lengths)]
        self._next += 1
        return length


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """What a step was made of, and what its drafting took."""

    shape: StepShape
    num_prompts: int  # sequences whose prompts it read
    draft_seconds: float
    num_drafted: int  # tokens, for the next step


@dataclass(slots=True)
class ObservedExecutor:
    """Another executor, whose steps are noted."""

    executor: Executor
    steps: list[ExecutedStep] = field(default_factory=list)

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`."""
        self.executor.prepare(spec)

    def execute(self, plan: StepPlan) -> ReadyResult:
        """See `Executor`; waits for the result."""
        result = self.executor.execute(plan).result()
        num_decoding = sum(one.num_tail == 1 and one.reaches_end for one in plan.sequences)
        self.steps.append(
            ExecutedStep(
                shape=StepShape.of_plan(plan),
                num_prompts=len(plan.sequences) - num_decoding,
                draft_seconds=result.times.draft,
                num_drafted=sum(len(one.draft.token_ids) for one in result.sequences),
            )
        )
        return ReadyResult(result)

    def release(self, ended: Sequence[EndedSequence]) -> None:
        """See `Executor`."""
        self.executor.release(ended)

    def as_in_a_step(self) -> AbstractContextManager[None]:
        """See `Executor`."""
        return self.executor.as_in_a_step()

    def read_blocks(self, blocks: Sequence[int], digests: Sequence[bytes]) -> tuple[BlockContents, ...]:
        """See `Executor`."""
        return self.executor.read_blocks(blocks, digests)

    def write_blocks(
        self, blocks: Sequence[int], digests: Sequence[bytes], caches: Sequence[BlockContents], *, first: int
    ) -> None:
        """See `Executor`."""
        self.executor.write_blocks(blocks, digests, caches, first=first)

    def check_health(self) -> None:
        """See `Executor`."""
        self.executor.check_health()


class CopiedContexts:
    """Puts prompts of random tokens into the prefix cache, with KV that was computed once and is copied.

    What the KV says does not matter to how long steps take; that each sequence has blocks of its own does.
    """

    def __init__(self, computed: RandomSequences, pool: BlockPool, *, block_size: int, vocab_size: int) -> None:
        self._computed = computed
        self._pool = pool
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._random = random.Random()  # no seed: the prefix cache may know the prompts of an earlier sweep

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt of random tokens that nobody has computed."""
        return self._random.choices(range(self._vocab_size), k=num_tokens)

    def cached_prompt(self, num_tokens: int) -> list[int]:
        """A prompt whose full blocks are in the prefix cache, those before its last token; fewer where memory is full."""
        prompt, size = self.prompt(num_tokens), self._block_size
        digests = list(block_digests(root_digest(None), prompt[:-1], block_size=size))
        blocks = self._pool.take(len(digests))
        if not blocks:
            return prompt
        slots = [block * size + offset for block in blocks for offset in range(size)]
        self._computed.copy_first(slots)
        known = [self._pool.register(block, digest) for block, digest in zip(blocks, digests, strict=True)]
        self._pool.give_back(known[::-1])
        return prompt
