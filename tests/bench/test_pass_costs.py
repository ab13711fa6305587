"""Costs of passes by their rows."""

from __future__ import annotations

import json

import pytest

from forerun.bench.pass_costs import FLAT, STEEP, PassCosts, read_costs
from forerun.errors import ConfigError


def test_costs_are_straight_between_the_points_and_beyond_the_last():
    costs = PassCosts((1, 3, 5), (1.0, 1.2, 1.6))
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 5, 7)] == pytest.approx([1.0, 1.1, 1.2, 1.4, 1.6, 2.0])


def test_a_curve_of_one_point_is_flat():
    assert PassCosts((1,), (1.0,)).of(9) == 1.0


def test_one_row_costs_one_pass_in_the_assumed_curves():
    assert FLAT.of(1) == STEEP.of(1) == 1.0
    assert STEEP.of(9) == pytest.approx(3.0)


def point(context, num_sequences, rows, ratio):
    return {"context": context, "num_sequences": num_sequences, "rows": rows, "ratio": ratio, "milliseconds": 4 * ratio}


@pytest.fixture
def curve(tmp_path):
    path = tmp_path / "curve.json"
    points = [point(256, 1, 8, 1.3), point(256, 1, 1, 1.0), point(256, 8, 1, 1.5), point(1024, 1, 1, 1.0)]
    path.write_text(json.dumps({"points": points}))
    return path


def test_a_measured_curve_has_the_rows_of_one_sequence_at_the_shortest_context(curve):
    assert read_costs(curve) == PassCosts((1, 8), (1.0, 1.3), 0.004)
    assert read_costs(curve, context=1024) == PassCosts((1,), (1.0,), 0.004)


def test_a_context_that_was_not_measured_is_refused(curve):
    with pytest.raises(ConfigError, match=r"got context 512; .* has 256, 1024"):
        read_costs(curve, context=512)


@pytest.mark.parametrize("content", ["", "{}", '{"points": []}', "[1]"])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="forerun bench curve --output-json"):
        read_costs(path)
