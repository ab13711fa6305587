"""Plans to emit, and a profile folder with Dynamo's two files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.plan.deployment_plan import DeploymentPlan, Layout
from forerun.plan.dynamo_files import (
    DECODE_FILE,
    PREFILL_FILE,
    DecodePoint,
    PrefillPoint,
    write_decode,
    write_mocker,
    write_prefill,
)
from forerun.plan.emit.emission import EmitRequest
from tests.plan.deployment_plans import PLAIN_PLAN
from tests.plan.profiles import fake_profile

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
WINDOW = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
EAGLE3 = {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}
SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 2], [17, 64, 0]]}

PLAN = replace(PLAIN_PLAN, speculative_config=NGRAM, acceptance={"conditional_accept_rates": [0.7, 0.6, 0.5, 0.4]})
APART = replace(PLAN, layout=Layout.DISAGGREGATED, prefill_replicas=1, decode_replicas=2)


def request(plan: DeploymentPlan = PLAN, *, profile_folder: Path | None = None, **changes: Any) -> EmitRequest:
    plan = replace(plan, **changes)
    return EmitRequest(plan=plan, model=plan.model, profile_folder=profile_folder)


def with_engine(plan: DeploymentPlan, **changes: Any) -> DeploymentPlan:
    return replace(plan, engine=replace(plan.engine, **changes))


def write_profile(folder: Path) -> Path:
    """A profile, and its files that Dynamo reads: sweeps of 0 and of 4 drafted tokens, of which a step yields 2."""
    profile = replace(fake_profile(), model=PLAN.model, machine=PLAN.profile["machine"], traces={})
    profile.save(folder)
    prompts = [PrefillPoint(isl=n, ttft_seconds=n / 1e4) for n in (100, 500, 1000)]
    write_prefill(folder / PREFILL_FILE, prompts)
    for length, accept_length in ((0, 1.0), (4, 2.0)):
        points = [
            DecodePoint(
                num_sequences=n,
                context=c,
                num_draft_tokens=length,
                step_seconds=0.01 + n / 1e3 + length / 1e4,
                accept_length=accept_length,
            )
            for n in (1, 8)
            for c in (200, 800)
        ]
        for path in (DECODE_FILE, Path(f"decode_k{length}/raw_data.npz")):
            write_decode(folder / path, points, max_kv_tokens=10_000)
        write_mocker(
            folder / f"mocker_k{length}.npz",
            profile.step_times,
            prompts,
            num_draft_tokens=length,
            contexts=[200, 800],
            num_sequences=[1, 8],
            max_kv_tokens=10_000,
        )
    return folder
