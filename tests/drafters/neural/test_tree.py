"""What `draft_tree` may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafters.neural.tree import DynamicTree, StaticTree, parse_tree
from forerun.errors import ConfigError


def test_nothing_is_a_chain():
    assert parse_tree(None) is None


def test_branching_by_level():
    tree = parse_tree([2, 1])
    assert tree == StaticTree(((0,), (1,), (0, 0), (1, 0)))
    assert tree.num_nodes == 4
    assert tree.num_places == 3  # the text's end, and both nodes of the first level
    assert [tree.num_children(ranks) for ranks in ((), (0,), (0, 0))] == [2, 1, 0]


def test_paths_in_any_order_become_levels():
    assert parse_tree([[0, 1], [0], [0, 0], [1]]).paths == ((0,), (1,), (0, 0), (0, 1))


def test_a_dynamic_tree():
    assert parse_tree({"top_k": 4, "depth": 3}) == DynamicTree(top_k=4, depth=3)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_branching_is_the_same_as_its_paths(counts):
    tree = parse_tree(counts)
    assert parse_tree([list(ranks) for ranks in reversed(tree.paths)]) == tree


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "may be branching by level"),
        ("[1]", "may be branching by level"),
        ([2, 0], "each level must branch at least once"),
        ([True], "got True among the paths"),
        ([[0], []], "got .. among the paths"),
        ([[0], [-1]], "each must be a list of ranks from 0"),
        ([[0], [0]], "path .0. is given twice"),
        ([[0], [1, 0]], "lacks its parent .1.; add it"),
        ([[0], [2]], "lacks the likelier .1.; add it"),
        ([8, 8, 8], "more than 128 nodes"),
        ([[i] for i in range(129)], "more than 128 nodes"),
        ({"top_k": 4}, "depth: got None; must be an integer from 1 to 128"),
        ({"top_k": 0, "depth": 2}, "top_k: got 0"),
        ({"topk": 4, "depth": 2}, "unknown key 'topk'; did you mean 'top_k'"),
    ],
)
def test_anything_else_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_tree(given)
