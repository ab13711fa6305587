"""What a request gives back, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from forerun.core.stats import PredictionCounts, SpeculationStats
from forerun.errors import ErrorKind


class Origin(StrEnum):
    """How a token came to be in the output (the terms of rejection sampling).

    accepted: drafted, and accepted by the verifier. recovered: the target's own token in place of a rejected
    one. bonus: the target's own token after the whole draft, or after an empty one.
    """

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The target's log probability (nats) of one token, its rank (1 = most likely), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> logprob: the token that was taken and the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt; in a stream, what has been generated so far.

    `origins[i]` says how `token_ids[i]` came to be: accepted from a draft, recovered, or bonus. Of a text that
    another engine began (a request with `output_ids`) `token_ids` and `text` are the whole, but `origins`,
    `logprobs` and `cumulative_logprob` are of the new tokens only, the last ones.
    `hidden_states_path` is the file of its hidden states, where the engine saves them. `prediction`
    counts the tokens drafted from the request's prediction; None where it has none.
    `finish_reason`: "stop" (a stop string, a stop token, EOS), "length", "abort", "error", or None
    while it runs; `stop_reason` is the stop string or stop token id, or the text of the error.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    origins: list[Origin] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    hidden_states_path: str | None = None
    prediction: PredictionCounts | None = None

    def finished(self) -> bool:
        """Whether this completion has ended, for whatever reason."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When a request arrived, was first scheduled, gave its first token and ended (s, monotonic clock)."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's completions, with vLLM's field names.

    `prompt_logprobs[0]` is None (nothing precedes the first token). `speculation` sums the
    statistics of all completions. `error` holds the reason where a completion ended in "error", or where
    its hidden states could not be saved, and `error_kind` whose mistake it is.
    `kv_transfer_params["hidden_states_path"]` is the first completion's file; None where the engine saves no hidden states.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    error: str | None = None
    error_kind: ErrorKind | None = None
    kv_transfer_params: dict[str, str] | None = None


@dataclass(slots=True, kw_only=True)  # not frozen, as one is made for each step of each sequence
class StreamDelta:
    """What one step added to one completion of a request.

    `token_ids` and `origins` are this step's tokens; `text` is the text that became certain with
    them (it may lag behind while a stop string or a multi-byte character is incomplete). `logprobs`
    are the tokens' own, where asked for; `prompt_logprobs` come with a request's first delta.

    The step verified a draft of `num_draft_tokens`, the first of them `drafter`'s, and accepted `num_accepted_tokens`, those
    that a stop rule cut included. `num_drafted_by` counts the draft's tokens by drafter. `token_drafters` names the drafter of
    each of `token_ids`; of the target's own token that is `drafter`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    origins: list[Origin]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafter: str | None = None
    num_drafted_by: dict[str, int] = field(default_factory=dict)
    token_drafters: list[str | None] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
