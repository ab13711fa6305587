"""Sampled text has the target's distribution, whatever drafts and whatever verifies (if lossless)."""

from __future__ import annotations

import pytest

from forerun.proof.adversary import AdversarialDrafter
from forerun.proof.report import Verdict
from forerun.proof.sampled import plan_experiment, run_experiment
from tests.contract.drafters import CASES, usually
from tests.engines import tiny_llm

ADVERSARIAL = {"method": AdversarialDrafter, "num_speculative_tokens": 4}
NUM_SAMPLES = 900
SEED_TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def experiment():
    return plan_experiment(tiny_llm(max_num_seqs=64), num_tokens=5, seed_text_ids=SEED_TEXT)


# Whatever drafts, a text of this verifier's is plain decoding's to the token (test_contract.py), so here it is enough that
# each kind of draft is looked at: none, trees of the host's and of a network's, drawn chains, mixed and hostile ones.
MATCHED = [
    *("plain", "suffix-tree", "draft-model-tree", "draft-model-coupled", "dflash-coupled", "hybrid-self"),
    "adversarial",
]


@pytest.mark.parametrize("drafter", usually([*CASES, "adversarial"], chosen=MATCHED))
def test_samples_fit_the_target_under_matching(experiment, drafter):
    config = ADVERSARIAL if drafter == "adversarial" else CASES[drafter]
    finding = run_experiment(
        tiny_llm(config, verifies_all=True), experiment, num_samples=NUM_SAMPLES, name=drafter, seed=1
    )
    assert finding.verdict in (Verdict.FITS, Verdict.UNTESTED)
    assert (finding.verdict is Verdict.UNTESTED) == (drafter in ("plain", "zero", "extract"))


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drafter", ["ngram", "suffix-tree", "hybrid-self", "adversarial"])
def test_samples_fit_the_target_under_rejection(experiment, drafter, method):
    config = ADVERSARIAL if drafter == "adversarial" else CASES[drafter]
    llm = tiny_llm(config | {"rejection_sample_method": method})
    finding = run_experiment(llm, experiment, num_samples=NUM_SAMPLES, name=drafter, seed=1)
    assert finding.verdict is Verdict.FITS
    assert finding.num_accepted_tokens > 0


# A verifier sees tokens with the probabilities that they were drawn from, and these are right whatever the network computes. So
# each way to draw them is looked at, a token or a level at a time or all at once, from the whole vocabulary or a part of it.
TOLD = [
    *((drafter, method) for drafter in ("draft-model", "draft-model-tree") for method in ("standard", "block")),
    *(("draft-model-foreign", "standard"), ("eagle3", "block"), ("medusa-tree", "standard"), ("dflash", "block")),
]
TELLING = (
    *("draft-model", "draft-model-tree", "draft-model-foreign", "self-exit", "eagle-tree", "eagle3", "mlp-speculator"),
    *("pard", "pard-tree", "peagle", "medusa", "medusa-tree", "dflash", "dflash-tree"),
)


@pytest.mark.parametrize(
    ("drafter", "method"),
    [
        pytest.param(drafter, method, marks=() if (drafter, method) in TOLD else pytest.mark.slow)
        for drafter in TELLING
        for method in ("standard", "block")
    ],
)
def test_samples_fit_the_target_where_the_drafter_tells_its_probabilities(experiment, drafter, method):
    config = CASES[drafter] | {"rejection_sample_method": method, "draft_sample_method": "probabilistic"}
    finding = run_experiment(
        tiny_llm(config, verifies_all=True), experiment, num_samples=NUM_SAMPLES, name=drafter, seed=1
    )
    assert finding.verdict is Verdict.FITS
    assert finding.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "lossy",
    [
        {"rejection_sample_method": "threshold", "acceptance_threshold": 0.05},
        {"rejection_sample_method": "typical"},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
    ],
)
def test_lossy_verifiers_say_so_and_do_not_fit(experiment, lossy, caplog):
    llm = tiny_llm(ADVERSARIAL | lossy)
    assert "this configuration is lossy" in caplog.text
    assert not llm.speculative.is_lossless
    assert "lossy" in llm.speculative.describe()
    finding = run_experiment(llm, experiment, num_samples=1500, name="lossy", seed=1)
    assert finding.verdict is Verdict.BUG
