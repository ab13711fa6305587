"""Dynamo's files of a profile: throughput of each GPU, and drafting of all sequences of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.bench.profiling.output import write_outputs
from forerun.bench.profiling.step_sweep import DECODE, MeasuredPrompt, MeasuredStep, RoundResult
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.dynamo_files import DECODE_FILE, DECODE_KEYS, MOCKER_KEYS, PREFILL_FILE, PREFILL_KEYS, read_arrays
from forerun.plan.profile import Profile
from forerun.plan.step_times import DraftingCost, StepSample
from tests.plan.profiles import fake_profile

HEAD = {"head": {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 4}}


def profile(**changes: object) -> Profile:
    """A profile of a head that drafts four tokens, each of them in half a millisecond."""
    parts = {
        "configs": HEAD,
        "drafting": {"head": DraftingCost(seconds_per_draft_token=5e-4)},
        "acceptance": {"head": AcceptanceProfile(method="eagle3", conditional=(1.0,) * 4)},
    }
    return replace(fake_profile(), **parts | changes)


def measured(found: Profile) -> RoundResult:
    """Steps of 1, 4 and 16 sequences, plain and with four drafted tokens each, as long as the profile says."""
    steps = []
    for num_sequences in (1, 4, 16):
        for length in (0, 4):
            shape = {
                "num_rows": num_sequences * (length + 1),
                "num_sequences": num_sequences,
                "num_context_tokens": num_sequences * 512,
            }
            sample = StepSample(
                **shape, num_draft_tokens=num_sequences * length, seconds=found.step_times.seconds(**shape)
            )
            steps.append(
                MeasuredStep(
                    sweep=DECODE,
                    round=0,
                    gigabytes_per_second=None,
                    num_sequences=num_sequences,
                    context=512,
                    sample=sample,
                )
            )
    prompts = [MeasuredPrompt(isl=length, ttft_seconds=length / 1e4) for length in (16, 64, 256)]
    return RoundResult(gigabytes_per_second=None, steps=steps, prompts=prompts)


def test_the_mocker_drafts_for_all_sequences_of_a_step_as_the_decode_sweep_does(tmp_path: Path) -> None:
    found = profile()
    write_outputs(found, [measured(found)], tmp_path)
    swept = read_arrays(tmp_path / "decode_k4" / "raw_data.npz", DECODE_KEYS, others=("z_step_ms", "batch"))
    mocked = read_arrays(tmp_path / "mocker_k4.npz", MOCKER_KEYS)
    for num_sequences, step_ms in zip(swept["batch"], swept["z_step_ms"], strict=True):
        row = int(np.flatnonzero(mocked["decode_active_kv_tokens"] == num_sequences * 512)[0])
        assert mocked["decode_itl"][row, 0] == pytest.approx(step_ms)


def test_throughput_is_that_of_each_gpu(tmp_path: Path) -> None:
    for num_gpus in (1, 2):
        found = profile(tensor_parallel_size=num_gpus)
        (tmp_path / str(num_gpus)).mkdir()
        write_outputs(found, [measured(found)], tmp_path / str(num_gpus))
    for file, keys, name in (
        (PREFILL_FILE, PREFILL_KEYS, "prefill_thpt_per_gpu"),
        (DECODE_FILE, DECODE_KEYS, "z_thpt_per_gpu"),
    ):
        one, two = (read_arrays(tmp_path / str(count) / file, keys)[name] for count in (1, 2))
        assert one == pytest.approx(2 * two)


def test_the_energy_of_a_step_is_that_of_its_drafting_too(tmp_path: Path) -> None:
    found = profile(watts=50.0)
    write_outputs(found, [measured(found)], tmp_path)
    swept = read_arrays(tmp_path / "decode_k4" / "raw_data.npz", ("z_energy_j", "z_step_ms"))
    assert swept["z_energy_j"] == pytest.approx(50.0 * swept["z_step_ms"] / 1e3)
