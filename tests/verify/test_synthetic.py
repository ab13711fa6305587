"""Synthetic acceptance hits the rates it was reported."""

import pytest

from forerun.core.draft import Draft
from forerun.errors import ConfigError
from forerun.verify.synthetic import SyntheticConfig, conditional_rates, rates_of_length
from tests.verify.judged import judged_of, random_rows

NUM_STEPS = 4000
LOGITS = random_rows(4)


def accepted_lengths(config, draft=None, num_steps=NUM_STEPS, **params):
    verifier, chain = config.build(3), Draft((1, 2, 3))
    judged = (judged_of(draft or chain, seed=seed, **params) for seed in range(num_steps))
    return [len(verdict.accepted) for verdict in verifier.verify(LOGITS, list(judged))]


@pytest.mark.parametrize("temperature", [0, 1])
def test_rates_are_met_at_every_position(temperature):
    lengths = accepted_lengths(SyntheticConfig(synthetic_acceptance_rates=[0.8, 0.5, 0.1]), temperature=temperature)
    rates = [sum(length > position for length in lengths) / NUM_STEPS for position in range(3)]
    assert rates == pytest.approx([0.8, 0.5, 0.1], abs=0.04)  # 5 standard deviations


def test_the_mean_length_is_met():
    lengths = accepted_lengths(SyntheticConfig(synthetic_acceptance_length=2.4))
    assert 1 + sum(lengths) / NUM_STEPS == pytest.approx(2.4, abs=0.04)


@pytest.mark.parametrize(("length", "expected"), [(1.0, 0), (4.0, 3)])
def test_the_extreme_lengths_are_met_always(length, expected):
    lengths = accepted_lengths(SyntheticConfig(synthetic_acceptance_length=length), num_steps=50)
    assert set(lengths) == {expected}


def test_a_short_draft_is_accepted_no_further_than_it_goes():
    assert set(accepted_lengths(SyntheticConfig(synthetic_acceptance_length=4.0), Draft((1,)), num_steps=20)) == {1}


def test_a_tree_is_followed_along_first_children():
    verifier = SyntheticConfig(synthetic_acceptance_length=4.0).build(3)
    assert verifier.verify(LOGITS, [judged_of(Draft((1, 2, 3), (-1, -1, 0)))])[0].accepted == (0, 2)


@pytest.mark.parametrize(
    ("length", "expected"), [(1.0, [0, 0, 0]), (2.5, [1, 0.5, 0]), (3.0, [1, 1, 0]), (4.0, [1, 1, 1])]
)
def test_a_length_becomes_ones_the_fraction_and_zeros(length, expected):
    assert rates_of_length(length, num_tokens=3) == expected


def test_conditional_rates_multiply_to_the_marginal_ones():
    assert conditional_rates([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("rates", [[0.5, 0.6], [1.1], [-0.1], [float("nan")], ["a"], 0.5, [True], [10**400]])
def test_rates_out_of_range_or_rising_are_refused(rates):
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates: got"):
        SyntheticConfig(synthetic_acceptance_rates=rates)


@pytest.mark.parametrize("length", [0.9, float("inf"), float("nan"), "2", True, pytest.param(10**400, id="no float")])
def test_lengths_out_of_range_are_refused(length):
    with pytest.raises(ConfigError, match="synthetic_acceptance_length: got"):
        SyntheticConfig(synthetic_acceptance_length=length)


@pytest.mark.parametrize(
    "keys", [{}, {"synthetic_acceptance_rates": [1.0], "synthetic_acceptance_length": 2.0}], ids=["none", "both"]
)
def test_exactly_one_way_to_say_it_is_required(keys):
    with pytest.raises(ConfigError, match="exactly one of"):
        SyntheticConfig(**keys)


def test_rates_must_be_one_per_speculative_token():
    with pytest.raises(ConfigError, match="got 2 rates; must be one for each of the 3"):
        SyntheticConfig(synthetic_acceptance_rates=[0.5, 0.5]).build(3)


def test_a_length_beyond_the_draft_is_refused():
    with pytest.raises(ConfigError, match="must be from 1 to 4 for 3"):
        SyntheticConfig(synthetic_acceptance_length=4.5).build(3)
