"""The chi-square test passes a correct verifier and fails one with a planted bug."""

from __future__ import annotations

import math

import pytest

from forerun.proof.adversary import AdversarialDrafter
from forerun.proof.report import Verdict
from forerun.proof.sampled import chi_square, plan_experiment, run_experiment
from tests.engines import tiny_llm


def test_counts_as_expected_give_zero():
    statistic, degrees = chi_square({(0,): 50, (1,): 50}, {(0,): 0.5, (1,): 0.5}, 100)
    assert (statistic, degrees) == (0.0, 1)


def test_an_impossible_outcome_is_infinitely_unlikely():
    assert chi_square({(2,): 1}, {(0,): 0.5, (1,): 0.5}, 1)[0] == math.inf


def test_rare_outcomes_are_merged_into_one_cell():
    probs = {(0,): 0.96, (1,): 0.02, (2,): 0.02}
    statistic, degrees = chi_square({(0,): 96, (1,): 4}, probs, 100)
    assert (statistic, degrees) == (0.0, 1)


def test_path_probabilities_sum_to_one():
    experiment = plan_experiment(tiny_llm(), num_tokens=4, seed_text_ids=[3, 1, 4])
    assert len(experiment.path_probs) == 64
    assert sum(experiment.path_probs.values()) == pytest.approx(1)


def test_a_verifier_that_forgets_the_residual_is_caught(monkeypatch):
    config = {"method": AdversarialDrafter, "num_speculative_tokens": 4, "rejection_sample_method": "standard"}
    llm = tiny_llm(config)
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    monkeypatch.setattr("forerun.verify.rejection._after_rejection", lambda target_probs, draft, node: target_probs)
    finding = run_experiment(llm, experiment, num_samples=1500, name="planted", seed=1)
    assert finding.verdict is Verdict.BUG
