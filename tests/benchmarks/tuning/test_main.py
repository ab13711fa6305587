"""What a measurement is of, by which it goes on or is refused."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.tuning.__main__ import _settings, identity_of
from forerun.bench.machine import describe_machine
from forerun.config.settings import EngineSettings
from forerun.plan.tuning.offered_load import parse_offered_load
from tests.engines import tiny_target

ARGUMENTS = Namespace(quick=True, max_tokens=8, rounds=1)


def identity(prompts):
    load = parse_offered_load("concurrency=1")
    settings = _settings(EngineSettings(model="tiny"), prompts, load, ARGUMENTS)
    return identity_of(settings, tiny_target())


def test_the_same_prompts_are_the_same_measurement():
    assert identity([[7, 8], [9]]) == identity([[7, 8], [9]])


def test_as_many_other_prompts_are_another_measurement():
    assert identity([[7, 8], [9]]) != identity([[7, 8], [10]])


def test_a_measurement_is_of_one_machine():
    assert identity([[7, 8]])["machine"] == describe_machine(tiny_target().model.device)
