"""The picture of a simulation: the same simulation gives the same bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from forerun.bench.simulation_picture import draw_simulation
from forerun.engine.simulation import SimulationSettings
from forerun.plan.load import Load
from forerun.plan.simulation.fleet import Fleet
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.simulate import simulate
from forerun.plan.sla import Sla


@pytest.mark.parametrize("count", [1, 40])
def test_the_same_simulation_gives_the_same_picture(count, tmp_path):
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        result = simulate(
            SimulationSettings(), synthetic_requests(Load(rate=9, isl=20, osl=9), count), fleet=Fleet(replicas=2)
        )
        draw_simulation(result, "a title", file, num_blocks=4096, sla=Sla(ttft=0.5))
    first, second = (file.read_text() for file in files)
    assert first.startswith("<?xml")
    assert "a title" in first
    assert first == second
