"""The ways to draft that may be planned: what a profile's traces and rates say of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.plan.drafting_choices import speculations
from forerun.plan.profile import Profile
from tests.plan.profiles import TREE, TREE_CONFIGS, fake_profile, tree_profile, tree_trace


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return fake_profile(tmp_path_factory.mktemp("profile"))


def test_rows_of_a_tree_are_its_nodes(tmp_path: Path) -> None:
    trees = tree_profile(tmp_path)
    by_name = {one.name: one for one in speculations(trees)}
    whole = by_name.pop("static")
    assert [(one.num_nodes, one.num_tokens) for one in whole.yields] == [
        (7, trees.acceptance["static"].mean_accept_length)
    ]
    assert [whole.nodes_of(length) for length in (0, 1)] == [0, 7]
    for name, speculation in by_name.items():
        trace = trees.trace(name)
        assert speculation.max_draft_tokens == trace.num_speculative_tokens == len(TREE)
        assert [one.num_nodes for one in speculation.yields] == [1, 2, 3, 4, 5, 6, 7]
        assert [one.num_tokens for one in speculation.yields] == [
            trace.acceptance(k).mean_accept_length for k in range(1, 8)
        ]


def test_acceptance_may_be_planned_with_care_and_by_class(profile: Profile) -> None:
    (code,) = speculations(profile, methods=("suffix",), kind="code")
    (careful,) = speculations(profile, methods=("suffix",), kind="code", confidence=0.9)
    assert careful.acceptance.mean_accept_length < code.acceptance.mean_accept_length
    assert code.acceptance == profile.acceptance["suffix/code"]


def test_what_is_named_twice_is_one_way_to_draft_and_plain_is_none(profile: Profile) -> None:
    assert [one.name for one in speculations(profile, methods=("suffix", "head", "suffix"))] == ["suffix", "head"]
    assert speculations(profile, methods=("plain", "plain")) == []


def test_trees_are_planned_as_far_as_short_answers_judge_them(tmp_path: Path) -> None:
    """Six tokens: the prompt's own step writes one, and behind a draft of four comes another."""
    trees, acceptance = tree_profile(tmp_path), {}
    for name, config in TREE_CONFIGS.items():
        trace = tree_trace(name, str(config["method"]), num_tokens=6)
        trace.save(trees.traces[name])
        acceptance[name] = trace.acceptance(4)
    found = speculations(replace(trees, acceptance=acceptance))
    assert {one.name: one.max_draft_tokens for one in found} == {"recycle": 4, "static": 1, "hybrid": 4, "auto": 4}
