"""The search space, and which of two configurations is the simpler."""

from __future__ import annotations

import pytest

from forerun.config.speculative_config import resolve_speculative
from forerun.plan.tuning.candidates import LOSSLESS_VERIFIERS, SPECULATION, BatchLimits, Candidate, SearchSpace

USUAL = BatchLimits(max_num_seqs=64, max_num_batched_tokens=2048)
FEWER = BatchLimits(max_num_seqs=16, max_num_batched_tokens=2048)


def candidate(config, **options):
    return Candidate(name="x", speculative_config=config, limits=options.pop("limits", USUAL), **options)


@pytest.mark.parametrize("name", SPECULATION)
def test_every_built_in_way_to_draft_is_a_speculative_config(name):
    assert resolve_speculative(SPECULATION[name]).num_speculative_tokens > 0


def test_the_whole_space_is_every_way_under_all_limits_in_all_formats():
    space = SearchSpace(speculation=SPECULATION, limits=[USUAL, FEWER], quantizations=[None, "int8"])
    found = space.all()
    assert len(found) == len({one.name for one in found}) == 2 * 2 * (len(SPECULATION) + 1)
    assert sum(one.speculative_config is None for one in found) == 4


def test_the_best_way_to_draft_may_be_verified_otherwise():
    space = SearchSpace(speculation=SPECULATION, limits=[USUAL], verifiers=LOSSLESS_VERIFIERS)
    suffix = {"method": "suffix", "num_speculative_tokens": 4}
    found = space.with_other_verifiers(candidate(suffix))
    assert [one.name for one in found] == ["x, standard", "x, block"]
    for one, verifier in zip(found, LOSSLESS_VERIFIERS, strict=True):
        assert one.speculative_config == suffix | {"rejection_sample_method": verifier}
        assert resolve_speculative(one.speculative_config).is_lossless
    assert not space.with_other_verifiers(candidate(None))
    assert not space.with_other_verifiers(candidate(suffix | {"rejection_sample_method": "typical"}))
    assert not SearchSpace(speculation=SPECULATION, limits=[USUAL]).with_other_verifiers(candidate(suffix))


def test_simplicity_rises_from_plain_over_auto_to_more_drafters_and_longer_drafts():
    ordered = [
        None,
        {"method": "auto"},
        {"method": "suffix", "num_speculative_tokens": 4},
        {"method": "suffix", "num_speculative_tokens": 12},
        SPECULATION["suffix-recycle-7"],
    ]
    ranks = [candidate(config).simplicity(USUAL) for config in ordered]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("changed", [{"limits": FEWER}, {"quantization": "int8"}])
def test_anything_but_the_users_own_options_is_less_simple(changed):
    usual = candidate({"method": "suffix", "num_speculative_tokens": 16}).simplicity(USUAL)
    assert candidate(None, **changed).simplicity(USUAL) > usual


def test_the_users_own_format_of_the_weights_is_the_simplest():
    suffix = {"method": "suffix", "num_speculative_tokens": 16}
    own = candidate(suffix, quantization="int8").simplicity(USUAL, "int8")
    assert own == candidate(suffix).simplicity(USUAL)
    assert candidate(None, quantization="int4").simplicity(USUAL, "int8") > own
