"""The picture of a tuning."""

from __future__ import annotations

import pytest

from tests.plan.tuning.figures import figures
from tests.plan.tuning.test_tuning_report import report


@pytest.mark.parametrize("joules", [None, 5.0])
def test_the_picture_names_every_run(tmp_path, joules):
    pytest.importorskip("matplotlib")
    from forerun.bench.tuning.picture import draw_tuning

    rounds = {name: [figures(speed, joules=joules)] for name, speed in (("auto", 90), ("plain", 50))}
    draw_tuning(report("auto", rounds), tmp_path / "pareto.svg")
    drawn = (tmp_path / "pareto.svg").read_text()
    assert ("joules per output token" in drawn) == (joules is not None)
    assert "simulated only" in drawn
