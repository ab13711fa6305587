"""The ways to draft that a profile measured, as plans choose between them: what each yields at each length, costs and leaves room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ConfigError, did_you_mean
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_lengths import DraftYield, Speculation, chain_yields, level_yields, whole_yield
from forerun.plan.drafter_memory import num_blocks
from forerun.plan.profile import PLAIN, Profile, chooses_lengths
from forerun.plan.request_spread import request_cv

TREES = ("draft_tree", "drafters", "suffix_decoding_tree")
"""Keys of a `speculative_config` with which drafts may be trees, or be those of several drafters."""


def speculations(
    profile: Profile,
    *,
    methods: Sequence[str] | None = None,
    kind: str | None = None,
    confidence: float | None = None,
) -> list[Speculation]:
    """The ways to draft that may be chosen beside no speculation, which "plain" is.

    Args:
        profile: what was measured.
        methods: names of the configurations; None: all.
        kind: the class of prompts whose acceptance counts; None: all.
        confidence: acceptance is that at the lower end of its interval; None: as measured.

    Raises:
        ConfigError: a method or a class of prompts was not profiled, or has too few counts for a confidence, or drafts leave a
            GPU no KV memory.
    """
    names = list(dict.fromkeys(profile.configs if methods is None else methods))
    if PLAIN in names:
        profile.steps_of(None)
        names.remove(PLAIN)
    for name in names:
        if name not in profile.configs:
            raise ConfigError(f"method: the profile has no {name!r}{did_you_mean(name, profile.configs)}")
    return [_speculation(profile, name, kind, confidence) for name in names]


def _speculation(profile: Profile, name: str, kind: str | None, confidence: float | None) -> Speculation:
    """One of them, with what its drafts yield at each length: of trees by their trace, of chains by their rates.

    A drafter with a `draft_tree` of its own computes all of it whatever is asked for, so that shorter drafts cost as much.
    """
    config, is_served = profile.configs[name], name in profile.served_steps
    is_adaptive = chooses_lengths(config) and not is_served

    def planned(measured: AcceptanceProfile) -> AcceptanceProfile:
        return measured if confidence is None else measured.lower(confidence)

    acceptance = planned(profile.acceptance_for(name, kind))
    trace = profile.trace(name) if name in profile.traces else None
    longest = config.get("num_speculative_tokens") if trace is None else trace.num_speculative_tokens
    has_trees = _may_draft_trees(config) if trace is None else trace.has_trees
    is_whole = False
    yields: tuple[DraftYield, ...]
    if is_served:
        yields, is_whole = (whole_yield(acceptance),), True
    elif not has_trees:
        yields = chain_yields(acceptance, max(1, min(acceptance.num_places, longest or acceptance.num_places)))
    elif trace is not None and (is_adaptive or not config.get("draft_tree")):
        by_length = [trace.acceptance(k, kind=kind) for k in range(1, trace.longest_judged(kind) + 1)]
        yields = tuple(whole_yield(planned(one)) for one in by_length)
    elif is_adaptive:
        yields = level_yields(acceptance)
    else:
        yields, is_whole = (whole_yield(acceptance),), True
    return Speculation(
        name=name,
        acceptance=acceptance,
        yields=yields,
        cost=profile.drafting[name],
        speculative_config=dict(config),
        is_adaptive=is_adaptive,
        is_whole=is_whole,
        whole_nodes=longest if is_whole and not is_served else None,
        request_cv=request_cv(profile, name, kind, longest or acceptance.num_places),
        step_times=profile.served_steps.get(name),
        num_blocks=num_blocks(profile, config),
    )


def _may_draft_trees(config: Mapping[str, Any]) -> bool:
    """Whether a draft may have more nodes than it is deep."""
    if any(config.get(key) for key in TREES):
        return True
    return config.get("method") == "auto" or (config.get("method") == "recycle" and config.get("recycle_tree", True))
