"""Penalties follow their definitions, and running counts equal counting afresh."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sampling_params import SamplingParams
from forerun.ops.penalties import Penalties

VOCAB_SIZE = 6
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)


def penalised(logits, *, output_ids=(), path=(), prompt_ids=(), **params):
    return after(Penalties(SamplingParams(**params), prompt_ids=prompt_ids), logits, output_ids, path)


def after(rules, logits, output_ids, path=()):
    shaped = np.array(logits, dtype=np.float32)
    rules.at(output_ids, path).apply(shaped)
    return shaped.tolist()


def naive(logits, prompt_ids, output_ids, params):
    shaped = []
    for token_id, logit in enumerate(logits):
        count = output_ids.count(token_id)
        if count or token_id in prompt_ids:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        shaped.append(logit - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return shaped


def test_repetition_scales_prompt_and_output_towards_unlikely():
    shaped = penalised([2.0, -2.0, 2.0, 0.0, 0.0, 0.0], prompt_ids=[0], output_ids=[1], repetition_penalty=2.0)
    assert shaped == [1.0, -4.0, 2.0, 0.0, 0.0, 0.0]


def test_frequency_counts_the_output_and_not_the_prompt():
    shaped = penalised([0.0] * 6, prompt_ids=[2], output_ids=[1, 1, 3], frequency_penalty=0.5)
    assert shaped == [0.0, -1.0, 0.0, -0.5, 0.0, 0.0]


def test_presence_counts_once():
    assert penalised([0.0] * 6, output_ids=[1, 1], presence_penalty=0.5)[1] == -0.5


def test_a_path_counts_as_output_for_one_call_only():
    rules, zeros = Penalties(SamplingParams(frequency_penalty=1.0), prompt_ids=[]), [0.0] * VOCAB_SIZE
    assert after(rules, zeros, [0], [1, 1]) == [-1, -2, 0, 0, 0, 0]
    assert after(rules, zeros, [0]) == [-1, 0, 0, 0, 0, 0]


@given(
    prompt_ids=token_lists,
    steps=st.lists(st.tuples(token_lists, token_lists), max_size=5),
    repetition=st.sampled_from([1.0, 1.3]),
    frequency=st.sampled_from([0.0, 0.7]),
    presence=st.sampled_from([0.0, -0.4]),
)
@settings(deadline=None, max_examples=80)
def test_running_counts_equal_counting_afresh(prompt_ids, steps, repetition, frequency, presence):
    params = SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    rules = Penalties(params, prompt_ids=prompt_ids)
    raw = [1.5, -0.5, 0.0, 2.0, -3.0, 0.25]
    output_ids = []
    for committed, path in steps:
        output_ids.extend(committed)
        assert after(rules, raw, output_ids, path) == pytest.approx(
            naive(raw, prompt_ids, output_ids + path, params), rel=1e-6, abs=1e-6
        )


def test_counts_are_held_of_the_texts_own_tokens_only():
    rules = Penalties(SamplingParams(repetition_penalty=1.3), prompt_ids=[1, 2, 2])
    assert rules.at([]).token_ids.tolist() == [1, 2]
    assert rules.at([7, 1]).token_ids.tolist() == [1, 2, 7]
    without_repetition = Penalties(SamplingParams(presence_penalty=0.5), prompt_ids=[1, 2, 2])
    assert without_repetition.at([7, 1]).token_ids.tolist() == [7, 1]


def test_texts_of_many_different_tokens_are_counted():
    rules, output_ids = Penalties(SamplingParams(frequency_penalty=1.0), prompt_ids=[]), list(range(500)) * 2
    penalised = rules.at(output_ids, [3])
    assert penalised.token_ids.tolist() == list(range(500))
    assert penalised.counts.tolist() == [2.0] * 3 + [3.0] + [2.0] * 496
