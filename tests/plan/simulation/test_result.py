"""Figures of values that are counted together are those of the values one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.simulation.records import RequestRecord
from forerun.plan.simulation.result import Values

PAIRS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=20)


@given(PAIRS, st.floats(0, 100))
def test_percentiles_mean_and_deviation_are_numpys(pairs, percent):
    values, counts = zip(*pairs, strict=True)
    each = np.repeat(values, counts)
    found = Values.of(values, counts)
    assert found.percentile(percent) == pytest.approx(np.percentile(each, percent), abs=1e-9)
    assert found.mean == pytest.approx(each.mean(), abs=1e-9)
    assert found.deviation == pytest.approx(each.std(), abs=1e-6)
    assert found.num_values == len(each)


def test_without_values_there_are_no_figures():
    none = Values.of([])
    assert math.isnan(none.mean)
    assert math.isnan(none.percentile(50))
    assert none.spread((50, 95)).percentiles == {50: None, 95: None}


def test_an_answer_of_one_token_has_no_time_per_token():
    record = RequestRecord(number=0, arrival=1.0, num_prompt_tokens=3, num_output_tokens=1, num_chunks=1)
    record.first_token = record.finished = 2.0
    assert (record.ttft, record.e2el) == (1.0, 1.0)
    assert math.isnan(record.tpot)
    assert math.isnan(record.icl)
