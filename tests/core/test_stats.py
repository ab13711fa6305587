"""Counting of verdicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.core.stats import PHASES, SpeculationStats, StepTimes


def test_a_chain_counts_positions_up_to_the_first_rejection():
    stats = SpeculationStats()
    stats.record(Draft((7, 8, 9)), (0,))
    assert (stats.accepted_per_position, stats.reached_per_position) == ([1, 0, 0], [1, 1, 0])
    assert (stats.acceptance_rate, stats.acceptance_length) == (1 / 3, 2.0)


def test_a_trees_path_that_ends_at_a_leaf_reaches_nothing_deeper():
    tree = Draft((1, 2, 3, 4), (-1, -1, 0, 2))  # the second child of the root is a leaf
    stats = SpeculationStats()
    stats.record(tree, (1,))
    assert stats.reached_per_position == [1, 0, 0]
    stats.record(tree, (0,))
    assert stats.reached_per_position == [2, 1, 0]
    assert stats.conditional_acceptance == [1.0, 0.0, 0.0]


@given(
    st.sampled_from(
        [Draft(), Draft((1, 2)), Draft((1, 2, 3), (-1, -1, 0), source="a"), Draft((1, 2), sources=("a", "b"))]
    ),
    st.sampled_from([(), (0,)]),
    st.integers(1, 5),
)
def test_equal_verdicts_may_be_counted_at_once(draft, accepted, times):
    accepted = accepted[: len(draft)]
    at_once, one_by_one = SpeculationStats(), SpeculationStats()
    at_once.record(draft, accepted, times=times)
    for _ in range(times):
        one_by_one.record(draft, accepted)
    assert at_once == one_by_one


def test_steps_without_a_draft_count_for_the_acceptance_length_only():
    stats = SpeculationStats()
    stats.record(Draft((7,)), (0,))
    stats.record(Draft(), ())
    assert (stats.num_steps, stats.num_drafts, stats.acceptance_rate, stats.acceptance_length) == (2, 1, 1.0, 1.5)


def test_counts_since_a_copy_are_the_difference():
    stats = SpeculationStats()
    stats.record(Draft((7, 8)), (0,))
    earlier = stats.copy()
    stats.record(Draft((7, 8, 9)), (0, 1, 2))
    since = stats.since(earlier)
    assert (since.num_steps, since.num_draft_tokens, since.accepted_per_position) == (1, 3, [1, 1, 1])


def test_milliseconds_per_step_are_means_of_each_phase():
    times = StepTimes(forward=0.5, draft=0.25, num_steps=5)
    assert times.milliseconds_per_step == {**dict.fromkeys(PHASES, 0.0), "forward": 100.0, "draft": 50.0}
    assert StepTimes().milliseconds_per_step == {}


def test_steps_are_counted_by_the_source_of_their_draft_too():
    stats = SpeculationStats()
    stats.record(Draft((7, 8), source="suffix"), (0, 1))
    stats.record(Draft((7, 8, 9), source="draft_model"), (0,))
    stats.record(Draft(), ())
    assert (stats.num_steps, stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 2, 5, 3)
    assert {name: counts.acceptance_rate for name, counts in stats.by_drafter.items()} == {
        "suffix": 1.0,
        "draft_model": 1 / 3,
    }


def test_counts_by_source_are_added_and_taken_away_with_the_others():
    stats = SpeculationStats()
    stats.record(Draft((7, 8), source="suffix"), (0, 1))
    earlier = stats.copy()
    stats.record(Draft((7, 8, 9), source="draft_model"), (0,))
    assert earlier.by_drafter.keys() == {"suffix"}
    since = stats.since(earlier)
    assert {name: counts.num_draft_tokens for name, counts in since.by_drafter.items()} == {
        "suffix": 0,
        "draft_model": 3,
    }


def test_rows_and_gains_of_all_drafters_are_shares_of_every_step():
    stats = SpeculationStats()
    stats.record(Draft((7, 8), source="suffix"), (0, 1))
    stats.record(Draft((7, 8, 9), source="recycle"), (0,))
    stats.record(Draft(), ())
    stats.record(Draft(), ())
    assert stats.drafted_per_step == {"suffix": 0.5, "recycle": 0.75}
    assert stats.gained_per_step == {"suffix": 0.5, "recycle": 0.25}
    assert stats.acceptance_length == 1 + sum(stats.gained_per_step.values())


MIXED = Draft((1, 2, 3, 4, 5), (-1, -1, 0, 2, 1), source="copy", sources=("copy", "head", "head", "head", "recycle"))


def test_each_drafter_of_a_draft_counts_its_own_tokens():
    stats = SpeculationStats()
    stats.record(MIXED, (0, 2))
    of = stats.by_drafter
    assert {name: (one.num_draft_tokens, one.num_accepted_tokens) for name, one in of.items()} == {
        "copy": (1, 1),
        "head": (3, 1),
        "recycle": (1, 0),
    }
    assert (of["head"].accepted_per_position, of["head"].reached_per_position) == ([0, 1, 0], [1, 1, 1])
    assert (of["recycle"].accepted_per_position, of["recycle"].reached_per_position) == ([0, 0], [0, 0])
    assert {one.num_steps for one in of.values()} == {1}


@given(
    st.lists(st.sampled_from(["copy", "head", "recycle"]), min_size=1, max_size=6).flatmap(
        lambda sources: st.tuples(st.just(tuple(sources)), st.integers(0, len(sources)))
    )
)
def test_what_the_drafters_of_a_chain_have_earned_is_what_all_have(case):
    sources, num_accepted = case
    stats = SpeculationStats()
    stats.record(Draft(tuple(range(len(sources))), source=sources[0], sources=sources), tuple(range(num_accepted)))
    of = stats.by_drafter.values()
    assert sum(one.num_draft_tokens for one in of) == stats.num_draft_tokens
    assert sum(one.num_accepted_tokens for one in of) == stats.num_accepted_tokens
    for position, reached in enumerate(stats.reached_per_position):
        assert (
            sum(one.reached_per_position[position] for one in of if position < len(one.reached_per_position)) == reached
        )
