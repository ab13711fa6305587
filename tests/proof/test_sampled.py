"""The chi-square test passes a correct verifier and fails one with a planted bug."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core.draft import NO_DRAFT, Draft
from forerun.proof.adversary import AdversarialDrafter
from forerun.proof.report import Verdict
from forerun.proof.sampled import PATH_LENGTH, chi_square, limit_of, plan_experiment, run_experiment
from forerun.verify import block
from forerun.verify.matching import match
from forerun.verify.rejection import acceptance_ratio
from tests.engines import tiny_llm

HOSTILE = {"method": AdversarialDrafter, "num_speculative_tokens": 4}


def test_counts_as_expected_give_zero():
    statistic, degrees = chi_square({(0,): 50, (1,): 50}, {(0,): 0.5, (1,): 0.5}, 100)
    assert (statistic, degrees) == (0.0, 1)


def test_an_impossible_outcome_is_infinitely_unlikely():
    assert chi_square({(2,): 1}, {(0,): 0.5, (1,): 0.5}, 1)[0] == math.inf


def test_rare_outcomes_are_merged_into_one_cell():
    probs = {(0,): 0.96, (1,): 0.02, (2,): 0.02}
    statistic, degrees = chi_square({(0,): 96, (1,): 4}, probs, 100)
    assert (statistic, degrees) == (0.0, 1)


def test_samples_too_few_for_any_path_have_no_degree_of_freedom():
    assert chi_square({(0,): 2, (2,): 1}, {(0,): 0.7, (1,): 0.1, (2,): 0.2}, 3) == (0.0, 0)


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 20, 50, 100, 215])
def test_a_right_verifier_is_convicted_in_one_experiment_of_a_million_at_most(degrees):
    halves = torch.tensor([degrees / 2, limit_of(degrees) / 2], dtype=torch.float64)
    assert 1e-7 < float(torch.special.gammaincc(*halves)) < 1.1e-6


def test_path_probabilities_sum_to_one():
    experiment = plan_experiment(tiny_llm(), num_tokens=4, seed_text_ids=[3, 1, 4])
    assert len(experiment.path_probs) == 64
    assert sum(experiment.path_probs.values()) == pytest.approx(1)


def test_a_verifier_that_forgets_the_residual_is_caught(monkeypatch):
    llm = tiny_llm(HOSTILE | {"rejection_sample_method": "standard"})
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    monkeypatch.setattr("forerun.verify.rejection._after_rejection", lambda target_probs, draft, node: target_probs)
    finding = run_experiment(llm, experiment, num_samples=1500, name="planted", seed=1)
    assert finding.verdict is Verdict.BUG


def test_a_verifier_that_judges_a_path_by_its_last_token_alone_is_caught(monkeypatch):
    llm = tiny_llm(HOSTILE | {"rejection_sample_method": "block"})
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    monkeypatch.setattr(
        block._Place, "reach_of", lambda place, child, draft: min(acceptance_ratio(place.left, draft, child), 1.0)
    )
    finding = run_experiment(llm, experiment, num_samples=900, name="planted", seed=1)
    assert finding.verdict is Verdict.BUG


@pytest.mark.parametrize("num_text_ids", [5, 6])
def test_adversarial_chains_and_trees_are_both_verified_to_the_path_s_end(monkeypatch, num_text_ids):
    met = []

    def note(draft, target):
        met.append((draft.is_chain, max(len(draft.path(node)) for node in range(len(draft)))))
        return match(draft, target)

    llm = tiny_llm(HOSTILE)
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=list(range(num_text_ids)))
    monkeypatch.setattr("forerun.verify.matching.match", note)
    run_experiment(llm, experiment, num_samples=20, name="hostile", seed=1)
    deep_enough = {is_chain for is_chain, depth in met if depth >= PATH_LENGTH - 1}
    assert deep_enough == {True, False}


def test_a_few_drafts_among_many_samples_prove_nothing():
    class Seldom(AdversarialDrafter):
        num_calls = 0

        def propose(self, context):
            self.num_calls += 1
            return super().propose(context) if self.num_calls == 1 else [NO_DRAFT] * len(context.requests)

    llm = tiny_llm({"method": Seldom, "num_speculative_tokens": 4})
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    finding = run_experiment(llm, experiment, num_samples=400, name="seldom", seed=1)
    assert 0 < finding.num_draft_tokens < 400
    assert finding.verdict is Verdict.UNTESTED


@pytest.mark.parametrize(("first", "verdict"), [(PATH_LENGTH, Verdict.UNTESTED), (1, Verdict.BUG)])
def test_drafts_of_what_is_not_compared_prove_nothing(first, verdict):
    class Liar(AdversarialDrafter):
        """Says that it draws any token, and always drafts the same one, from a place of the text on."""

        def propose(self, context):
            return [self.draft(request) for request in context.requests]

        def draft(self, request):
            if len(request.sequence.output_ids) < first:
                return NO_DRAFT
            allowed = request.sequence.sampling.allowed_token_ids
            probs = torch.zeros(1, self._vocab_size)
            probs[0, allowed] = 1 / len(allowed)
            return Draft((allowed[-1],), probs=probs)

    llm = tiny_llm({"method": Liar, "num_speculative_tokens": 1, "rejection_sample_method": "standard"})
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    finding = run_experiment(llm, experiment, num_samples=400, name="liar", seed=1)
    assert finding.num_draft_tokens >= 400
    assert finding.verdict is verdict


def test_a_statistic_that_is_no_number_does_not_fit(monkeypatch):
    llm = tiny_llm(HOSTILE)
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    monkeypatch.setattr("forerun.proof.sampled.chi_square", lambda *_: (math.nan, 12))
    assert run_experiment(llm, experiment, num_samples=20, name="hostile", seed=1).verdict is Verdict.BUG


def test_one_sample_proves_nothing():
    llm = tiny_llm(HOSTILE)
    experiment = plan_experiment(llm, num_tokens=5, seed_text_ids=[3, 1, 4, 1, 5])
    assert run_experiment(llm, experiment, num_samples=1, name="hostile", seed=1).verdict is Verdict.UNTESTED
