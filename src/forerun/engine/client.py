"""What passes between an engine and whoever uses it: plain records, so that the two may be in different processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.core.sampling_params import SamplingParams
from forerun.engine.stats import EngineState, EngineStats, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt, to be completed `sampling.n` times.

    `group` names the client's request that it is part of; where more than fits wants to run, groups take
    turns. None: it is a group of its own. `output_ids` are tokens that another engine has written after the
    prompt: the completion continues as if this one had written them, so that `sampling` counts them too, in
    `max_tokens`, `min_tokens`, penalties and stop rules. Its `token_ids` and `text` begin with them;
    `origins`, `logprobs` and all deltas are of new tokens only.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    prompt: str | None = None
    cache_salt: str | None = None
    group: str | None = None
    output_ids: Sequence[int] = ()


@dataclass(slots=True)
class StepOutput:
    """What one step gave: new text per completion, and the requests that ended with it."""

    deltas: list[StreamDelta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's counters and state at one moment."""

    stats: EngineStats
    state: EngineState

    def metrics(self) -> list[Metric]:
        """All counters and gauges, in vLLM's names where vLLM has them."""
        return self.stats.metrics(self.state)


class EngineClient(Protocol):
    """How an engine is used, in this thread, from another, or from another process.

    `accept`, `withdraw`, `check_health`, `finish_files` and `wait_for_files` may be called at any time from any
    thread; the rest from one.
    """

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def accept(self, request: EngineRequest) -> None:
        """Check a request and make ready what it needs, which may take long.

        Raises:
            RequestError: it does not fit the model or the engine.
        """
        ...

    def withdraw(self, request_id: str) -> None:
        """Forget a request that was accepted and will not be submitted."""
        ...

    def submit(self, request_id: str) -> None:
        """Queue an accepted request."""
        ...

    def step(self) -> StepOutput:
        """The next events."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """What every step sets up and puts back, set up once for all steps that this thread takes inside the block."""
        ...

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; what it has given, or None if it is not there."""
        ...

    def check_health(self) -> None:
        """Look whether steps can still be computed, with work or without.

        Raises:
            WorkerError: another process that holds a part of the model has ended.
        """
        ...

    def finish_files(self, output: RequestOutput) -> None:
        """Wait until the hidden states of an ended request are in their files, if they are saved."""
        ...

    def wait_for_files(self) -> None:
        """Wait until few files of hidden states are still to be written, if they are saved."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Statistics, apart from those that go on counting."""
        ...
