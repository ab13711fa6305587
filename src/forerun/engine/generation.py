"""One completion on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.outputs import CompletionOutput, Origin, TokenLogprobs
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import tokens_between
from forerun.core.stats import PredictionCounts, SpeculationStats
from forerun.core.step import PlannedSequence, SequenceSpec
from forerun.engine.text import CompletionText
from forerun.errors import ErrorKind
from forerun.kv.block_table import BlockTable


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """A completion with all that the engine knows of it; its executor knows `spec` and its tokens too.

    `group` is the client's request that it belongs to, which shares the running places with other
    requests. `stop_tokens` maps each token that ends the text to the stop_reason it gives (None: EOS).
    `draft` is what the executor drafted for the next step; `asked_limit` how much of it was asked for, and `draft_limit` how
    much of the draft after it.
    `in_flight` are its rows in a step whose result has not been applied.
    """

    spec: SequenceSpec
    request_id: str
    index: int
    group: str
    table: BlockTable
    stop_tokens: dict[int, int | None]
    text: CompletionText | None  # None: detokenize=False
    hidden_states_path: str | None = None  # where they are saved when the text ends
    output_ids: list[int] = field(default_factory=list)
    draft: Draft = NO_DRAFT
    draft_limit: int = 0
    asked_limit: int = 0
    in_flight: PlannedSequence | None = None
    prefix_digests: list[bytes] | None = None  # of the tokens so far, kept while it waits for room
    origins: list[Origin] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    prediction: PredictionCounts | None = None  # None: the request has no prediction
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_cached_tokens: int | None = None  # None: not admitted yet
    num_counted_prompt_tokens: int = 0  # in the statistics; computing them again counts no more
    is_known: bool = False  # to the executor
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None  # of finish_reason "error"

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return self.spec.prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling settings."""
        return self.spec.sampling

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.spec.prompt_ids) + len(self.output_ids)

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the logits at every prompt token are wanted still, so that no cached block will do."""
        wanted = self.spec.sampling.prompt_logprobs is not None
        return wanted and self.index == 0 and not self.output_ids

    def draft_limit_within(self, most: int) -> int:
        """The most nodes of its next draft, where the engine drafts at most so many: fewer where the request asks for fewer."""
        asked = self.spec.sampling.request_speculation.num_speculative_tokens
        return most if asked is None else min(most, asked)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Committed tokens at places [start, end), prompt included."""
        return tokens_between(self.spec.prompt_ids, self.output_ids, start, end)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End this completion; the first reason stands."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stop_reason = stop_reason

    def output(self) -> CompletionOutput:
        """What has been generated so far, in vLLM's form."""
        wants_logprobs = self.sampling.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text if self.text is not None else "",
            token_ids=list(self.output_ids),
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            origins=list(self.origins),
            speculation=self.stats,
            hidden_states_path=self.hidden_states_path if self.finish_reason in SAVED else None,
            prediction=self.prediction,
        )


SAVED = ("stop", "length")
"""Finish reasons of completions that ended by themselves: only their hidden states are saved."""
