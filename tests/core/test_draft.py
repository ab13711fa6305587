"""Walks through drafts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from forerun.core.draft import NO_DRAFT, Draft


@st.composite
def drafts(draw):
    """Chains and trees of few different tokens, so that siblings may be equal."""
    size = draw(st.integers(0, 8))
    token_ids = tuple(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    if draw(st.booleans()):
        return Draft(token_ids)
    return Draft(token_ids, tuple(draw(st.integers(-1, node - 1)) for node in range(size)))


@given(draft=drafts(), token_id=st.integers(0, 2))
def test_a_child_is_the_first_node_that_continues_another_with_the_token(draft, token_id):
    for node, children in enumerate(draft.children(), -1):
        expected = next((child for child in children if draft.token_ids[child] == token_id), -1)
        assert draft.child(node, token_id) == expected


@given(draft=drafts(), text=st.lists(st.integers(0, 2), max_size=6))
def test_as_much_of_a_text_stood_as_some_path_of_first_children_holds(draft, text):
    children, node, expected = draft.children(), -1, 0
    for token_id in text:
        following = [child for child in children[node + 1] if draft.token_ids[child] == token_id]
        if not following:
            break
        node, expected = following[0], expected + 1
    assert draft.num_stood(text) == expected


@given(draft=drafts(), num_nodes=st.integers(0, 8))
def test_a_part_of_a_draft_keeps_who_drafted_each_node(draft, num_nodes):
    names = tuple(f"drafter {node}" for node in range(len(draft)))
    mixed = replace(draft, source=names[0] if names else None, sources=names)
    part = mixed.first(num_nodes)
    assert [part.source_of(node) for node in range(len(part))] == list(names[:num_nodes])
    assert part.num_drafted_by() == dict.fromkeys(names[:num_nodes], 1)
    if draft.parents is not None:
        path = mixed.path(len(mixed) - 1)
        assert [mixed.only(path).source_of(i) for i in range(len(path))] == [names[node] for node in path]


def test_none_of_a_drafts_nodes_are_no_draft_of_anybodys():
    for draft in (Draft((1, 2), source="one"), Draft((1, 2), (-1, -1), source="one")):
        assert draft.only([]) is NO_DRAFT
