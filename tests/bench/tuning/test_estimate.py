"""The estimate that is said first: each stage, as if no draft helped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.bench.tuning.estimate import Estimate
from forerun.plan.tuning.candidates import BatchLimits, SearchSpace
from forerun.plan.tuning.offered_load import OfferedLoad
from tests.bench.tuning.workloads import PROMPTS, workload

LIMITS = BatchLimits(max_num_seqs=64, max_num_batched_tokens=2048)
SPACE = SearchSpace(speculation={"auto": {"method": "auto"}}, limits=[LIMITS])


def estimate(*, space=SPACE, rounds=1, num_finalists=2, **options):
    return Estimate.of(
        workload(**options), space, lambda rows, sequences: 0.01, rounds=rounds, num_finalists=num_finalists
    )


def test_runs_of_clients_take_as_long_as_their_tokens():
    num_tokens = len(PROMPTS) * 24
    one, three = estimate(), estimate(load=OfferedLoad(concurrency=3))
    assert one.run == pytest.approx(2 * num_tokens * 0.01)
    assert three.run == pytest.approx(one.run / 3)


def test_runs_at_a_rate_last_as_long_as_requests_arrive():
    assert estimate(load=OfferedLoad(rate=0.1)).run == pytest.approx(2 * (len(PROMPTS) / 0.1 + 24 * 0.01))


def test_plain_decoding_is_run_once_and_the_others_in_every_round():
    assert estimate(rounds=3).run == pytest.approx(2 * estimate().run)


def test_every_format_of_the_weights_is_recorded_and_measured():
    both = estimate(space=replace(SPACE, quantizations=(None, "int8")))
    assert both.record == 2 * estimate().record
    assert both.measure_steps == 2 * estimate().measure_steps
    assert both.total == pytest.approx(both.record + both.measure_steps + both.simulate + both.run)
