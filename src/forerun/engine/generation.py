"""One sequence on its way through the engine, and the rows it gets in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.outputs import CompletionOutput, TokenLogprobs
from forerun.core.sequence import Sequence
from forerun.core.stats import SpeculationStats
from forerun.core.verdict import Origin
from forerun.engine.text import CompletionText
from forerun.errors import ErrorKind
from forerun.kv.slots import Slot
from forerun.ops.sampling import SamplingRules


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """A sequence with all that the engine knows of it.

    `stop_tokens` maps each token that ends the text to the stop_reason it gives (None: EOS).
    `max_length` is the sequence length (prompt included) at which generation ends for lack of room.
    `draft` are the bets that the next step will verify.
    """

    sequence: Sequence
    request_id: str
    index: int
    slot: Slot
    rules: SamplingRules
    stop_tokens: dict[int, int | None]
    max_length: int
    text: CompletionText | None  # None: detokenize=False
    draft: Draft = NO_DRAFT
    origins: list[Origin] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_cached_tokens: int | None = None  # None: not admitted yet
    hidden_states_path: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None  # of finish_reason "error"

    @property
    def finished(self) -> bool:
        """Whether this generation has ended."""
        return self.finish_reason is not None

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens whose KV is not in the cache yet; 1 in steady decoding."""
        return len(self.sequence) - self.slot.num_computed

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the logits at every prompt token are wanted still, so that no cached block will do."""
        wanted = self.sequence.sampling.prompt_logprobs is not None
        return wanted and self.index == 0 and not self.sequence.output_ids

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End this generation; the first reason stands."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stop_reason = stop_reason

    def output(self) -> CompletionOutput:
        """What has been generated so far, in vLLM's form."""
        wants_logprobs = self.sequence.sampling.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text if self.text is not None else "",
            token_ids=list(self.sequence.output_ids),
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            origins=list(self.origins),
            speculation=self.stats,
            hidden_states_path=self.hidden_states_path,
        )


@dataclass(slots=True)
class Work:
    """The rows of one generation in one step: `num_tail` committed tokens, then a draft.

    Rows start at place `start` of the sequence. Only when the tail reaches the last committed
    token is there something to judge, and only then may the draft be non-empty.
    """

    generation: Generation
    start: int
    num_tail: int
    draft: Draft = NO_DRAFT

    @property
    def reaches_end(self) -> bool:
        """Whether the last committed token is among the rows, so that a next token can be chosen."""
        return self.start + self.num_tail == len(self.generation.sequence)

    @property
    def num_rows(self) -> int:
        """Rows in the forward pass."""
        return self.num_tail + len(self.draft)
