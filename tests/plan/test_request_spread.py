"""How differently a drafter does on different requests."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.plan.capacity import predict
from forerun.plan.draft_lengths import fixed_lengths, step_table
from forerun.plan.draft_trace import NOTHING, DraftTrace, TracedDraft, TracedText
from forerun.plan.load import Load
from forerun.plan.request_spread import request_cv
from forerun.plan.serving_policies import ServingPolicy
from tests.plan.profiles import fake_profile
from tests.plan.worlds import engine_model, speculation


def text(kind: str, *, is_easy: bool, num_tokens: int = 13) -> TracedText:
    """All of each draft of two tokens stands, or none."""
    draft = TracedDraft(2, None, None, "suffix", (0, 1) if is_easy else ())
    return TracedText(kind=kind, num_prompt_tokens=5, drafts=[NOTHING, *[draft] * (num_tokens - 1)])


def test_texts_are_walked_as_steps_would(tmp_path: Path) -> None:
    profile = fake_profile()
    texts = [text("code", is_easy=True), text("chat", is_easy=False)]
    path = tmp_path / "suffix.npz"
    DraftTrace.of_texts("suffix", "suffix", 2, texts).save(path)
    profile = replace(profile, traces={"suffix": path})
    # 12 tokens in 4 steps of 3, and in 12 of 1
    assert request_cv(profile, "suffix", None, 2) == pytest.approx(np.std([4, 12]) / 8)
    assert request_cv(profile, "suffix", None, 1) == pytest.approx(np.std([6, 12]) / 9)
    assert request_cv(profile, "suffix", "code", 2) == 0.0


def test_without_a_trace_classes_of_prompts_say_it() -> None:
    profile = replace(fake_profile(), traces={})
    lengths = [profile.acceptance[f"suffix/{kind}"].expected(2) for kind in ("chat", "code")]
    steps = [1.0 / length for length in lengths]
    assert request_cv(profile, "suffix", None, 2) == pytest.approx(np.std(steps) / np.mean(steps))
    assert request_cv(profile, "suffix", "code", 2) == 0.0
    assert request_cv(profile, "head", None, 2) == 0.0  # has no classes


def test_requests_that_differ_widen_the_time_per_token_and_leave_its_mean() -> None:
    engine, load = engine_model(max_num_seqs=8), Load(rate=1, isl=100, osl=100)
    found = []
    for cv in (0.0, 0.5):
        drafter = replace(speculation(0.8, 0.6), request_cv=cv)
        table = step_table(engine.step_times, drafter, max_batch_size=8, context=150)
        policy = ServingPolicy(speculation=drafter, lengths=fixed_lengths(8, 2), max_num_seqs=8, table=table)
        found.append(predict(engine, policy, load, np.array([1.0])).tpot)
    alike, different = found
    assert different.mean[0] == alike.mean[0]
    assert different.quantile(0.95)[0] > 1.5 * alike.quantile(0.95)[0]
