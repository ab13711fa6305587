"""The seam between engine and executors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from forerun.core.step import EndedSequence, PendingResult, SequenceSpec, StepPlan
from forerun.kv.transfer import BlockContents


class Executor(Protocol):
    """Carries out plans: owns the model, the KV tensors, the verifier and the drafter, or stands for them.

    Plans are executed in the order in which they come. Of each sequence an executor keeps its tokens and the
    draft that it made for it, so that a plan can be made before the last result is known.
    """

    def prepare(self, spec: SequenceSpec) -> None:
        """Make ready what a sequence's sampling needs, which may take long; any thread may call this.

        Raises:
            RequestError: a sampling value does not fit the model.
            ConfigError: what a sampling value needs is not installed.
        """
        ...

    def execute(self, plan: StepPlan) -> PendingResult:
        """Compute a plan's rows, verify its drafts, and draft for the next step; or have a device begin with it.

        Where it raises, no sequence has changed, and the same rows may be planned again.

        Raises:
            StepError: the step does not fit into the device's memory; a smaller one may.
            WorkerError: the device, or a process that holds a part of the model, is gone.
        """
        ...

    def as_in_a_step(self) -> AbstractContextManager[None]:
        """What a step computes under; inside the block this thread's steps need not set it up, each for itself."""
        ...

    def read_blocks(self, blocks: Sequence[int], digests: Sequence[bytes]) -> tuple[BlockContents, ...]:
        """Copies of what lies in the full blocks that a text begins with, which have these digests; between two steps."""
        ...

    def write_blocks(
        self, blocks: Sequence[int], digests: Sequence[bytes], caches: Sequence[BlockContents], *, first: int
    ) -> None:
        """Put what `read_blocks` of another engine gave into blocks, from the text's block `first` on; between two steps.

        Raises:
            ConfigError: the other engine has another model, drafter, dtype or size of blocks.
        """
        ...

    def check_health(self) -> None:
        """Look whether plans can still be executed; any thread may call this at any time.

        Raises:
            WorkerError: the device, or another process that holds a part of the model, is gone.
        """
        ...

    def release(self, ended: Sequence[EndedSequence]) -> None:
        """Forget sequences that have ended, or were prepared and never ran; unknown ones are left alone."""
        ...
