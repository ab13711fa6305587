"""Draft traces: every draft comes back from the file, cut to any length, and acceptance is counted step by step."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_trace import NOTHING, DraftTrace, TracedDraft, TracedText
from tests.plan.profiles import random_trace


@st.composite
def drafts(draw: st.DrawFn) -> TracedDraft:
    """A chain or a tree, with or without chances, of which a path is right."""
    count = draw(st.integers(0, 6))
    if not count:
        return NOTHING
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    shape = Draft((0,) * count, parents)
    right = tuple(shape.path(draw(st.integers(-1, count - 1))))
    survival = (
        tuple(np.float32(draw(st.floats(0, 1, width=32))).item() for _ in parents) if draw(st.booleans()) else None
    )
    source = draw(st.sampled_from([None, "suffix", "ngram"]))
    return TracedDraft(count, None if shape.is_chain else parents, survival, source, right)


@st.composite
def texts(draw: st.DrawFn) -> TracedText:
    return TracedText(
        kind=draw(st.sampled_from(["code", "chat"])),
        num_prompt_tokens=draw(st.integers(1, 9)),
        drafts=[NOTHING, *draw(st.lists(drafts(), max_size=5))],
    )


@given(st.lists(texts(), min_size=1, max_size=4))
def test_every_draft_comes_back_from_the_file(
    tmp_path_factory: pytest.TempPathFactory, given_texts: list[TracedText]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "a.npz"
    DraftTrace.of_texts("name", "suffix", 6, given_texts).save(path)
    trace = DraftTrace.load(path)
    assert trace.kinds == tuple(text.kind for text in given_texts)
    for number, text in enumerate(given_texts):
        assert trace.num_answer_tokens(number) == len(text.drafts)
        assert [trace.draft(number, place) for place in range(len(text.drafts))] == list(text.drafts)
        assert trace.draft(number, len(text.drafts)) == NOTHING, "nothing comes after the end"


@given(drafts(), st.integers(0, 6), st.integers(0, 6))
def test_a_cut_draft_is_a_draft_within_both_limits(draft: TracedDraft, limit: int, depth: int) -> None:
    cut = draft.within(limit=limit, depth=depth)
    assert cut.num_nodes <= limit
    shape = Draft((0,) * cut.num_nodes, cut.parents)
    assert shape.depth <= depth
    assert list(cut.right_nodes) == [node for node in draft.right_nodes if node < cut.num_nodes]


def test_acceptance_is_that_of_the_steps_that_write_the_text() -> None:
    def chain(num_right: int) -> TracedDraft:
        return TracedDraft(2, None, None, None, tuple(range(num_right)))

    # the steps begin at places 1, 4 and 6: those between are skipped over
    drafts = [NOTHING, chain(2), chain(0), chain(0), chain(1), chain(2), chain(0), chain(2), chain(2)]
    trace = DraftTrace.of_texts("a", "suffix", 2, [TracedText(kind="x", num_prompt_tokens=1, drafts=drafts)])
    assert trace.acceptance().conditional == (2 / 3, 1 / 2)
    assert trace.acceptance(1).conditional[0] == pytest.approx(3 / 5)  # places 1, 3, 4, 6, 7
    with pytest.raises(ConfigError, match="must be one of x"):
        trace.acceptance(kind="y")


@settings(max_examples=50)
@given(st.lists(texts(), min_size=1, max_size=3), st.integers(1, 6))
def test_acceptance_is_counted_over_the_first_nodes_of_each_draft(given_texts: list[TracedText], limit: int) -> None:
    """Against the same steps, taken one by one with drafts that are cut as the engine cuts them."""
    trace = DraftTrace.of_texts("name", "suffix", 6, given_texts)
    num_steps, num_nodes, stood, proposed = 0, 0, [0] * limit, [0] * limit
    for text in range(trace.num_texts):
        place, end = 1, trace.num_answer_tokens(text)
        while end - 1 - place >= limit:
            draft = trace.draft(text, place).within(limit=limit, depth=end - 1 - place)
            depth = Draft((0,) * draft.num_nodes, draft.parents).depth if draft.num_nodes else 0
            num_steps, num_nodes = num_steps + 1, num_nodes + draft.num_nodes
            for at in range(limit):
                stood[at] += at < len(draft.right_nodes)
                proposed[at] += at < depth
            place += len(draft.right_nodes) + 1
    if not num_steps:
        with pytest.raises(ConfigError, match="no draft was judged"):
            trace.acceptance(limit)
        return
    expected = AcceptanceProfile.of_counts("suffix", num_steps, stood, proposed, num_nodes=num_nodes)
    assert trace.acceptance(limit) == expected


def test_the_length_of_a_draft_counts_the_nodes_of_a_tree() -> None:
    """Three roots, each with one child; the third root and its child are right."""
    tree = TracedDraft(6, (-1, -1, -1, 0, 1, 2), None, None, (2, 5))
    trace = DraftTrace.of_texts(
        "tree", "recycle", 6, [TracedText(kind="x", num_prompt_tokens=1, drafts=[NOTHING, *[tree] * 60])]
    )
    found = [trace.acceptance(k) for k in range(1, 7)]
    assert [one.mean_accept_length for one in found] == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
    assert [one.mean_nodes for one in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_classes_of_prompts_are_counted_apart_and_together() -> None:
    trace = random_trace(num_texts=8)
    parts = [trace.acceptance(kind=kind).num_reached[0] for kind in ("code", "chat")]
    assert trace.acceptance().num_reached[0] == sum(parts)


def test_files_with_a_bit_that_is_another_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    random_trace(num_texts=20).save(path)
    whole = path.read_bytes()
    for place in range(100, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(ConfigError):  # some bits say nothing of what is read
            DraftTrace.load(path)


def test_damaged_files_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(ConfigError, match=r"a\.npz"):
        DraftTrace.load(path)
    path.write_bytes(b"not a file of arrays")
    with pytest.raises(ConfigError, match=r"a\.npz"):
        DraftTrace.load(path)
    np.savez(path, version=np.array(1))
    with pytest.raises(ConfigError, match="lacks"):
        DraftTrace.load(path)
    random_trace().save(path)
    with np.load(path) as found:
        arrays = dict(found)
    np.savez(path, **arrays | {"version": np.array(True)})
    with pytest.raises(ConfigError, match="is of version True; must be 1"):
        DraftTrace.load(path)
    for name, value in (
        ("first_places", np.array([])),
        ("first_places", np.array(1)),
        ("num_speculative_tokens", [1, 2]),
    ):
        np.savez(path, **arrays | {name: value})
        with pytest.raises(ConfigError, match=r"a\.npz"):
            DraftTrace.load(path)
    np.savez(path, **arrays | {"parents": arrays["parents"][:-1]})
    with pytest.raises(ConfigError, match="parents has shape"):
        DraftTrace.load(path)
    np.savez(path, **arrays | {"parents": arrays["parents"] + 1})
    with pytest.raises(ConfigError, match="comes before its parent"):
        DraftTrace.load(path)
