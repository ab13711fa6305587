"""The seam between engine and executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.core.step import EndedSequence, SequenceSpec, StepPlan, StepResult


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

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a plan's rows, verify its drafts, and draft for the next step.

        Where it raises, no sequence has changed, and the same rows may be planned again.
        """
        ...

    def release(self, ended: Sequence[EndedSequence]) -> None:
        """Forget sequences that have ended, or were prepared and never ran; unknown ones are left alone."""
        ...
