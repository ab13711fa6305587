"""Draft traces: every draft comes back from the file, cut to any length, and acceptance is counted step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.errors import ConfigError
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


def test_classes_of_prompts_are_counted_apart_and_together() -> None:
    trace = random_trace(num_texts=8)
    parts = [trace.acceptance(kind=kind).num_reached[0] for kind in ("code", "chat")]
    assert trace.acceptance().num_reached[0] == sum(parts)


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
    np.savez(path, **arrays | {"parents": arrays["parents"][:-1]})
    with pytest.raises(ConfigError, match="parents has shape"):
        DraftTrace.load(path)
