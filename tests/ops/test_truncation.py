"""Min-p, top-k and top-p keep what a full sort says they keep."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.exact_math import nucleus_weight, weights
from forerun.ops.truncation import truncate


def kept_ids(logits, **rules):
    logits = np.asarray(logits, dtype=np.float32)
    kept = truncate(logits - logits.max(), **{"min_p": 0.0, "top_k": 0, "top_p": 1.0, **rules})
    ids = np.arange(len(logits)) if kept.token_ids is None else kept.token_ids
    return ids[kept.logits > -math.inf].tolist()


def naive_kept_ids(logits, *, min_p, top_k, top_p):
    """The rules one after the other over a fully sorted vocabulary, in double precision."""
    order = sorted(range(len(logits)), key=lambda t: (-float(logits[t]), t))
    largest = float(logits.max())
    weight = {t: math.exp(float(logits[t]) - largest) for t in order}
    order = [t for t in order if float(logits[t]) - largest >= (math.log(min_p) if min_p else -math.inf)]
    if 0 < top_k < len(order):
        order = [t for t in order if logits[t] >= logits[order[top_k - 1]]]
    total, before, kept = sum(weight[t] for t in order), 0.0, []
    for t in order:
        if before >= top_p and top_p < 1.0:
            break
        kept.append(t)
        before += weight[t] / total
    return sorted(kept)


@given(
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=400),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 150, 1000]),
    top_p=st.sampled_from([1e-9, 0.123, 0.5077, 0.9137, 0.99917, 1.0]),
)
@settings(deadline=None, max_examples=150)
def test_truncation_agrees_with_its_naive_twin(values, min_p, top_k, top_p):
    logits = np.array(values, dtype=np.float32) / np.float32(3)
    rules = {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    expected = naive_kept_ids(logits, **rules)
    # The shares of equal logits fall on the edge of the nucleus only by rounding; these edges are not for this test.
    if top_p == 1.0 or naive_kept_ids(logits, **{**rules, "top_p": top_p + 1e-5}) == expected:
        assert kept_ids(logits, **rules) == expected


def test_a_nucleus_of_thousands_is_found():
    logits = np.linspace(0, -1, 5000, dtype=np.float32)
    assert kept_ids(logits, top_p=0.9) == naive_kept_ids(logits, min_p=0.0, top_k=0, top_p=0.9)


def test_top_p_counts_probabilities_after_top_k():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept_ids(logits, top_k=2, top_p=0.5) == [0]


def test_min_p_acts_before_top_p():
    logits = np.log([0.5, 0.3, 0.2])
    assert kept_ids(logits, min_p=0.5, top_p=0.6) == [0]


@pytest.mark.parametrize("rules", [{"top_k": 1}, {"min_p": 1.0}])
def test_ties_for_the_last_place_all_stay(rules):
    assert kept_ids([1.0, 2.0, 2.0], **rules) == [1, 2]


def test_ties_at_the_edge_of_the_nucleus_go_to_the_lowest_id():
    assert kept_ids(np.zeros(4), top_p=0.45) == [0, 1]


def test_the_tiniest_top_p_keeps_one_token():
    assert kept_ids([0.0, 3.0, 1.0], top_p=1e-12) == [1]


def test_nothing_switched_on_keeps_the_whole_vocabulary():
    assert truncate(np.zeros(5, dtype=np.float32), min_p=0.0, top_k=0, top_p=1.0).token_ids is None


@given(
    values=st.lists(st.integers(-400, 0), min_size=1, max_size=300),
    top_p=st.floats(1e-6, 1.0, exclude_max=True),
)
@settings(deadline=None, max_examples=150)
def test_a_nucleus_is_the_fewest_likely_tokens_that_weigh_enough_to_the_last_bit(values, top_p):
    logits = np.array(values, dtype=np.float32) / np.float32(16)
    logits -= logits.max()
    weight = weights(logits).tolist()
    wanted = nucleus_weight(sum(weight), top_p)
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    fewest = next(n for n in range(1, len(order) + 1) if sum(weight[t] for t in order[:n]) >= wanted)
    assert kept_ids(logits, top_p=top_p) == sorted(order[:fewest])
