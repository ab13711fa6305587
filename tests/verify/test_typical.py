"""Typical and threshold acceptance take the longest path that the target finds likely enough."""

import math

import pytest

from forerun.core.draft import Draft
from forerun.errors import ConfigError
from forerun.verify.typical import ThresholdConfig, TypicalConfig
from tests.verify.judged import VOCAB_SIZE, judged_of, random_rows, rows_preferring

LIKELY = math.exp(4) / (math.exp(4) + VOCAB_SIZE - 1)  # of the preferred token in `rows_preferring`
OTHER = 1 / (math.exp(4) + VOCAB_SIZE - 1)


def accepted(config, draft, logits):
    return config.build(4).verify(logits, [judged_of(draft)])[0].accepted


def test_a_threshold_between_two_probabilities_tells_them_apart():
    config = ThresholdConfig(acceptance_threshold=0.5)
    assert accepted(config, Draft((3, 4, 5)), rows_preferring(3, 4, 0, 0)) == (0, 1)


@pytest.mark.parametrize(("threshold", "expected"), [(OTHER * 0.9, (0, 1)), (OTHER * 1.1, ())])
def test_the_threshold_is_on_the_target_probability(threshold, expected):
    assert (
        accepted(ThresholdConfig(acceptance_threshold=threshold), Draft((5, 6)), rows_preferring(0, 0, 0)) == expected
    )


def test_the_longest_path_of_a_tree_wins():
    draft = Draft((3, 4, 5, 6), (-1, -1, 1, 2))
    config = ThresholdConfig(acceptance_threshold=OTHER * 0.9)
    assert accepted(config, draft, rows_preferring(3, 0, 0, 0, 0)) == (1, 2, 3)


def test_a_path_is_cut_at_its_first_unlikely_token():
    draft = Draft((3, 4, 5, 1), (-1, 0, 1, -1))
    assert accepted(ThresholdConfig(), draft, rows_preferring(3, 0, 5, 0, 0)) == (0,)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TypicalConfig(posterior_threshold=0.09, posterior_alpha=1.0), (0,)),  # 0.125 > 0.09
        (TypicalConfig(posterior_threshold=0.5, posterior_alpha=0.9), (0,)),  # 0.125 > 0.9 / 8
        (TypicalConfig(posterior_threshold=0.5, posterior_alpha=1.0), ()),  # not above 1 / 8
        (TypicalConfig(posterior_threshold=0.2, posterior_alpha=1.0), ()),
    ],
)
def test_typical_acceptance_takes_the_lower_of_threshold_and_entropy_floor(config, expected):
    flat = rows_preferring(0, 0) * 0.0  # entropy log(8), every probability 1 / 8
    flat[:, 0] += 1e-4  # token 7 stays just below 1 / 8
    assert accepted(config, Draft((7,)), flat) == expected


def test_defaults_are_medusas():
    assert (TypicalConfig().posterior_threshold, TypicalConfig().posterior_alpha) == (0.09, 0.3)


def test_the_last_token_is_the_targets_own_sample():
    logits, verifier = random_rows(2), ThresholdConfig(acceptance_threshold=0.0).build(1)
    verdict = verifier.verify(logits, [judged_of(Draft((2,)), seed=3, position=5)])[0]
    plain = verifier.verify(logits, [judged_of(first_row=1, seed=3, position=6)])[0]
    assert verdict.token_id == plain.token_id


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.5", True, None])
@pytest.mark.parametrize(
    ("config", "key"),
    [
        (TypicalConfig, "posterior_threshold"),
        (TypicalConfig, "posterior_alpha"),
        (ThresholdConfig, "acceptance_threshold"),
    ],
)
def test_values_that_are_no_probabilities_are_refused(config, key, value):
    with pytest.raises(ConfigError, match=f"{key}: got"):
        config(**{key: value})
