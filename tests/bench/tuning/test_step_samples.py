"""Measured steps: which shapes they have, and that drafts are of every length."""

from __future__ import annotations

from forerun.bench.tuning.step_samples import DRAFT_LENGTHS, batch_sizes, measure_steps
from forerun.plan.step_times import StepTimeModel
from forerun.plan.tuning.offered_load import OfferedLoad
from tests.bench.tuning.workloads import LIMITS, SETTINGS, workload
from tests.engines import tiny_target


def test_batch_sizes_double_up_to_what_the_load_can_bring():
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 32, 64]


def test_steps_of_every_batch_size_and_draft_length_are_measured_and_prompts_alone():
    said = []
    samples = measure_steps(tiny_target(), SETTINGS, workload(load=OfferedLoad(concurrency=2)), LIMITS, said.append)
    decoding = [one for one in samples if not one.num_prompt_rows]
    assert {one.num_sequences for one in decoding} >= {1, 2}
    assert {one.num_draft_tokens for one in decoding if one.num_sequences == 1} >= set(DRAFT_LENGTHS)
    assert all(one.num_rows == one.num_sequences + one.num_draft_tokens for one in decoding)
    prompts = [one for one in samples if one.num_prompt_rows]
    assert {one.num_prompt_rows for one in prompts} >= {3, 12}
    assert all(one.num_rows == 0 for one in prompts)
    assert all(one.seconds > 0 for one in samples)
    assert StepTimeModel.fit(samples).seconds(num_rows=3, num_sequences=1, num_context_tokens=9) > 0
    assert any("2 sequence(s)" in line for line in said)
