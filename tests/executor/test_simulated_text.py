"""What simulated targets write and drafters draft: draws by place, the same however many are made at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.core.random_bits import GAMMA, UNIT, mix
from forerun.core.sampling_params import SamplingParams
from forerun.core.step import SequenceSpec
from forerun.executor.simulated_text import ConditionalAcceptance


def num_right(rates, seed, position, limit):
    """One draw for each token of a draft, one after the other."""
    for depth in range(limit):
        drawn = (mix(seed * GAMMA ^ (position << 16) ^ (depth + 1)) >> 12) * UNIT
        if drawn >= rates[min(depth, len(rates) - 1)]:
            return depth
    return limit


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2**64 - 1),
    st.integers(0, 5000),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_acceptance_that_is_drawn_for_many_places_at_once_is_that_of_each(rates, seed, position, limit, depth):
    spec = SequenceSpec(seq_id=0, prompt_ids=[1], sampling=SamplingParams(), seed=seed, max_length=9999)
    depth = min(depth, limit)
    shape, right = ConditionalAcceptance(rates).draft(spec, position, limit=limit, depth=depth, min_survival=0.0)
    assert right == tuple(range(num_right(rates, seed, position, depth)))
    assert shape.num_nodes == depth
