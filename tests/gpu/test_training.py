"""On a GPU `forerun train` ends in a head that drafts, and learns what it learns on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from forerun.train import estimates  # noqa: E402
from forerun.train.copied_block import begin_from_block  # noqa: E402
from forerun.train.eagle3_trainer import Eagle3Trainer, Eagle3TrainSettings  # noqa: E402
from forerun.train.run import TrainingRun  # noqa: E402
from forerun.train.run_settings import RunSettings  # noqa: E402
from forerun.train.target import load_for_training  # noqa: E402
from tests.train.target_folder import chat_model_folder  # noqa: E402
from tests.train.test_eagle3_trainer import DRAFT_IDS, learned  # noqa: E402


def trainer(device):
    """Of ten steps."""
    target = load_for_training(str(chat_model_folder()), dtype=torch.bfloat16, device=device)
    settings = Eagle3TrainSettings(num_steps=10, batch_tokens=200, pass_tokens=100)
    return Eagle3Trainer(target, *begin_from_block(target, DRAFT_IDS, seed=0), learned(), settings)


def losses(device):
    training = trainer(device)
    return [training.run_step().loss for _ in range(10)]


def test_the_losses_are_those_of_the_cpu():
    assert losses("cuda") == pytest.approx(losses("cpu"), rel=0.03)


def test_a_step_waits_for_nothing():
    training = trainer("cuda")
    reports = [training.run_step()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports += [training.run_step() for _ in range(8)]  # the next one is measured
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(report.loss > 0 for report in reports)


def test_a_run_ends_in_a_head_that_drafts(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "LEAST_STEPS", 3)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': f'Question {number}?'})}\n" for number in range(64)))
    asked = RunSettings(
        model=str(chat_model_folder()),
        output=tmp_path / "head",
        prompts=prompts,
        epochs=3.0,
        draft_vocab_size=240,
        device="cuda",
    )
    run = TrainingRun(asked, lambda found: None)
    run.estimate(seconds=0.2)
    assert run.target.model.device.type == "cuda"
    assert all(one.num_steps > 0 for one in run.go().at)
