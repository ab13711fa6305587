"""The configurations that a tuning may try, and which of two is the simpler."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.plan.profile import PLAIN

AUTO = "auto"

VERIFIER = "rejection_sample_method"
LOSSLESS_VERIFIERS = ("standard", "block")
"""Verifiers beside matching that keep the target's distribution; where texts are greedy they do the same as it."""

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
ADAPTIVE = {"enable_adaptive_verification": True}
SPECULATION: Mapping[str, Mapping[str, Any]] = {
    AUTO: {"method": AUTO},
    **{f"ngram-{k}": {"method": "ngram", "num_speculative_tokens": k, **LOOKUP} for k in (1, 2, 3, 5, 8, 16)},
    **{f"suffix-{k}": {"method": "suffix", "num_speculative_tokens": k} for k in (2, 4, 8, 12, 16)},
    "suffix-tree-12": {"method": "suffix", "num_speculative_tokens": 12, "suffix_decoding_tree": True},
    "suffix-16-adaptive": {"method": "suffix", "num_speculative_tokens": 16, **ADAPTIVE},
    **{
        f"recycle-chain-{k}": {"method": "recycle", "num_speculative_tokens": k, "recycle_tree": False}
        for k in (1, 2, 3)
    },
    **{f"recycle-tree-{k}": {"method": "recycle", "num_speculative_tokens": k} for k in (3, 7, 15)},
    **{
        f"suffix-recycle-{k}": {
            "method": "hybrid",
            "num_speculative_tokens": max(k, 12),
            "drafters": [{"method": "suffix"}, {"method": "recycle", "num_speculative_tokens": k}],
        }
        for k in (3, 7, 15)
    },
    "suffix-recycle-15-adaptive": {
        "method": "hybrid",
        "num_speculative_tokens": 16,
        "drafters": [{"method": "suffix"}, {"method": "recycle", "num_speculative_tokens": 15}],
        **ADAPTIVE,
    },
}
"""Drafters that need no model of their own, in the lengths and trees that differ: name -> speculative_config."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BatchLimits:
    """The engine's limits of a step, in the names of `EngineSettings`."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def label(self, usual: BatchLimits) -> str:
        """What differs from the usual limits, for names of configurations."""
        seqs = [f"{self.max_num_seqs} seqs"] if self.max_num_seqs != usual.max_num_seqs else []
        differ = self.max_num_batched_tokens != usual.max_num_batched_tokens
        return ", ".join([*seqs, *([f"{self.max_num_batched_tokens} tokens"] if differ else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration: how to draft (None: not at all), the limits of a step, the format of the weights."""

    name: str
    speculative_config: Mapping[str, Any] | None
    limits: BatchLimits
    quantization: str | None = None

    @property
    def is_auto(self) -> bool:
        """Whether it chooses for itself while it runs, and nothing about it was set, its verifier neither."""
        config = self.speculative_config
        return config is not None and config.get("method") == AUTO and VERIFIER not in config

    @property
    def num_speculative_tokens(self) -> int:
        """The most tokens that it drafts, as far as the configuration says; 0 for the method's own choice."""
        return int((self.speculative_config or {}).get("num_speculative_tokens") or 0)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return {
            "name": self.name,
            "speculative_config": self.speculative_config,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "quantization": self.quantization,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Candidate:
        """The candidate of a record that `to_json` made."""
        limits = BatchLimits(
            max_num_seqs=record["max_num_seqs"], max_num_batched_tokens=record["max_num_batched_tokens"]
        )
        return cls(
            name=record["name"],
            speculative_config=record["speculative_config"],
            limits=limits,
            quantization=record["quantization"],
        )

    def simplicity(self, usual: BatchLimits, quantization: str | None = None) -> tuple[float, ...]:
        """What ties are decided by, less is simpler.

        No drafts; then auto, which has nothing to set and follows the load; then a fixed drafter, by how many
        drafters it has, how many tokens it drafts and how many settings. Before all: the limits and the format of the
        weights that the user's own options give, `usual` and `quantization`.
        """
        config = self.speculative_config
        kind = 0 if config is None else 1 if self.is_auto else 2
        num_drafters = len((config or {}).get("drafters") or (None,))
        changes = (self.limits != usual) + (self.quantization != quantization)
        return (changes, kind, num_drafters, self.num_speculative_tokens, len(config or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What may be chosen: ways to draft, limits of a step, formats of the weights.

    `limits` and `quantizations` begin with those that the user's own options give. Plain decoding is always
    part of the space. `verifiers` are tried with the best ways to draft, beside the one that these name.
    """

    speculation: Mapping[str, Mapping[str, Any]]
    limits: Sequence[BatchLimits]
    quantizations: Sequence[str | None] = (None,)
    verifiers: Sequence[str] = ()

    @property
    def usual(self) -> BatchLimits:
        """The limits that the user's own options give."""
        return self.limits[0]

    @property
    def plain(self) -> Candidate:
        """Plain decoding with the user's own limits and format."""
        return self.drafting()[0]

    def drafting(self) -> list[Candidate]:
        """Every way to draft and plain decoding, in every format, at the usual limits."""
        ways: dict[str, Mapping[str, Any] | None] = {PLAIN: None, **self.speculation}
        return [
            Candidate(
                name=name if quantization is None else f"{name}, {quantization}",
                speculative_config=config,
                limits=self.usual,
                quantization=quantization,
            )
            for quantization, (name, config) in itertools.product(self.quantizations, ways.items())
        ]

    def with_other_limits(self, candidate: Candidate) -> list[Candidate]:
        """The same way to draft under each of the other limits."""
        return [
            replace(candidate, name=f"{candidate.name}, {limits.label(self.usual)}", limits=limits)
            for limits in self.limits[1:]
        ]

    def with_other_verifiers(self, candidate: Candidate) -> list[Candidate]:
        """The same way to draft, its drafts verified otherwise; none where nothing is drafted, or it names a verifier itself."""
        config = candidate.speculative_config
        if config is None or VERIFIER in config:
            return []
        return [
            replace(candidate, name=f"{candidate.name}, {name}", speculative_config={**config, VERIFIER: name})
            for name in self.verifiers
        ]

    def all(self) -> list[Candidate]:
        """Everything, as an exhaustive sweep would try it."""
        return [one for first in self.drafting() for one in (first, *self.with_other_limits(first))]

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        limits = [[one.max_num_seqs, one.max_num_batched_tokens] for one in self.limits]
        speculation = json.loads(json.dumps(dict(self.speculation)))
        formats = {"quantizations": [*self.quantizations], "verifiers": [*self.verifiers]}
        return {"speculation": speculation, "limits": limits} | formats
