"""The device draws the very tokens that `ops.sampling` draws, by formula and on the kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sampling_params import SamplingParams
from forerun.ops.cuda import sampling
from forerun.ops.cuda.table import RuleTable, StepRows
from forerun.ops.sampling import SamplingRules, target_tokens
from forerun.ops.truncation import floor_of
from tests.cuda import DEVICE, ints, random

from forerun.ops.cuda.kernels import sampling as kernels  # isort: skip - tests.cuda comes first


def rows_and_rules(requests, seeds, positions, vocab_size):
    """Rows, each of its own sequence."""
    num_rows = len(requests)
    rules = RuleTable.empty(num_rows, vocab_size, device=DEVICE)
    rows = StepRows.empty(num_rows, num_rows, longest_path=1, device=DEVICE)
    rows.slots.copy_(ints(*range(num_rows)))
    rows.positions.copy_(ints(*positions) - 1)
    for slot, params in enumerate(requests):
        rules.seeds[slot] = seeds[slot]
        rules.temperature[slot] = 0.0 if params.temperature < 1e-5 else params.temperature
        rules.floor[slot] = floor_of(params.min_p)
        rules.top_k[slot] = min(max(params.top_k, 0), vocab_size)
        rules.top_p[slot] = params.top_p
    return rows, rules


def draw(module, logits, requests, seeds, positions):
    """The tokens and largest logits of rows."""
    num_rows, vocab_size = logits.shape
    rows, rules = rows_and_rules(requests, seeds, positions, vocab_size)
    token_ids, largest = (
        torch.full((num_rows,), -7, dtype=torch.int32, device=DEVICE),
        torch.zeros(num_rows, device=DEVICE),
    )
    module.sample(logits.to(DEVICE), rows, rules, token_ids, largest)
    return token_ids.tolist(), largest.tolist()


def on_the_host(logits, requests, seeds, positions):
    return [
        target_tokens(
            SamplingRules(params, prompt_ids=[0], vocab_size=logits.shape[1]),
            row.cpu(),
            [],
            seed=seed,
            position=position,
            count=1,
        )[0]
        for row, params, seed, position in zip(logits, requests, seeds, positions, strict=True)
    ]


REQUESTS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.3, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 700]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.9999, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
)


@settings(max_examples=8, deadline=None)
@given(
    st.data(),
    st.lists(REQUESTS, min_size=1, max_size=4),
    st.sampled_from([1, 3, 64, 1025]),
    st.sampled_from(["spread", "ties", "flat", "half out"]),
    st.integers(0, 2**31),
)
def test_tokens_are_the_hosts(data, requests, vocab_size, kind, seed):
    logits = random(len(requests), vocab_size, seed=seed, scale=3.0)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "half out":
        logits[:, 1::2] = -math.inf
    seeds = [data.draw(st.integers(0, 2**63 - 1)) for _ in requests]
    positions = [data.draw(st.integers(1, 10_000)) for _ in requests]
    expected = on_the_host(logits, requests, seeds, positions)
    for module in (sampling, kernels):
        found, largest = draw(module, logits, requests, seeds, positions)
        assert found == expected
        assert largest == logits.max(-1).values.tolist()


@settings(max_examples=8, deadline=None)
@given(
    st.data(),
    st.lists(REQUESTS.filter(lambda params: params.temperature > 0), min_size=1, max_size=4),
    st.sampled_from([1, 3, 64, 1025]),
    st.sampled_from(["spread", "ties", "flat", "half out", "all but two out"]),
    st.integers(1, 5),
    st.integers(0, 2**31),
)
def test_runners_up_are_those_of_the_hosts_races(data, requests, vocab_size, kind, count, seed):
    """Fewer where fewer have a chance; padding is left as it is."""
    logits = random(len(requests) + 1, vocab_size, seed=seed, scale=3.0)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind != "spread":
        logits[:, 1 :: 2 if kind == "half out" else 1][:, : None if kind == "half out" else -1] = -math.inf
    seeds = [data.draw(st.integers(0, 2**63 - 1)) for _ in requests]
    positions = [data.draw(st.integers(1, 10_000)) for _ in requests]
    rows, rules = rows_and_rules([*requests, requests[0]], [*seeds, 0], [*positions, 1], vocab_size)
    rows.slots[-1] = -1
    expected = [
        target_tokens(
            SamplingRules(params, prompt_ids=[0], vocab_size=vocab_size),
            *(row.cpu(), []),
            seed=of_row,
            position=position,
            count=count,
        )
        for row, params, of_row, position in zip(logits, requests, seeds, positions, strict=False)
    ]
    padded = [tokens + [sampling.NO_TOKEN] * (count - len(tokens)) for tokens in expected]
    for module in (sampling, kernels):
        token_ids = torch.full((len(logits), count), -7, dtype=torch.int32, device=DEVICE)
        module.sample_first(logits.clone(), rows, rules, token_ids)
        assert token_ids.tolist() == [*padded, [-7] * count]


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_row_whose_largest_logit_is_not_finite_has_no_race(special):
    logits = random(2, 50)
    logits[0, 7 if special != -math.inf else slice(None)] = special
    rows, rules = rows_and_rules([SamplingParams(temperature=1.0)] * 2, [0, 1], [3, 4], 50)
    for module in (sampling, kernels):
        token_ids = torch.full((2, 3), -7, dtype=torch.int32, device=DEVICE)
        module.sample_first(logits.clone(), rows, rules, token_ids)
        assert token_ids[0].tolist() == [sampling.NO_TOKEN] * 3
        assert len({*token_ids[1].tolist()} - {sampling.NO_TOKEN}) == 3


def test_a_vocabulary_of_many_programs_is_one_race():
    requests = [SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=0.0), SamplingParams(top_k=5)]
    logits = random(3, 2 * kernels.TOKENS_PER_PROGRAM + 17)
    arguments = (logits, requests, [1, 2, 3], [4, 5, 6])
    assert draw(kernels, *arguments)[0] == on_the_host(*arguments)
    rows, rules = rows_and_rules(*arguments[1:], logits.shape[1])
    firsts = [torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for module, token_ids in zip((sampling, kernels), firsts, strict=True):
        module.sample_first(logits.clone(), rows, rules, token_ids)
    assert torch.equal(firsts[0][[0, 2]], firsts[1][[0, 2]])  # the other is greedy
    assert (firsts[0][[0, 2]] >= 0).all()


@pytest.mark.parametrize("special", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_largest_logit_is_not_finite_draws_nothing(special, temperature):
    logits = random(2, 50)
    logits[0, 7] = special
    requests = [SamplingParams(temperature=temperature, top_p=0.9)] * 2
    for module in (sampling, kernels):
        (token, other), (largest, _) = draw(module, logits, requests, [0, 0], [1, 1])
        assert token == sampling.NO_TOKEN
        assert other == on_the_host(logits[1:], requests[1:], [0], [1])[0]
        assert np.array_equal(largest, abs(special), equal_nan=True)


def test_zeros_of_both_signs_are_ties_for_the_lowest_id():
    logits = torch.tensor([[-1.0, -0.0, 0.0]])
    for module in (sampling, kernels):
        assert draw(module, logits, [SamplingParams(temperature=0.0)], [0], [1])[0] == [1]


def test_padding_rows_are_not_written():
    rules = RuleTable.empty(1, 8, device=DEVICE)
    rows = StepRows.empty(2, 1, longest_path=1, device=DEVICE)
    for module in (sampling, kernels):
        token_ids, largest = ints(5, 6), torch.tensor([1.0, 2.0], device=DEVICE)
        module.sample(random(2, 8), rows, rules, token_ids, largest)
        assert token_ids.tolist() == [5, 6]
        assert largest.tolist() == [1.0, 2.0]
