"""Penalties follow their definitions, and running counts equal counting afresh."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sampling_params import SamplingParams
from forerun.ops.penalties import Penalties

VOCAB_SIZE = 6
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)


def penalised(logits, *, output_ids=(), path=(), prompt_ids=(), **params):
    rules = Penalties(SamplingParams(**params), prompt_ids=prompt_ids, vocab_size=VOCAB_SIZE)
    shaped = torch.tensor(logits)
    rules.apply(shaped, output_ids, path)
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
    rules = Penalties(SamplingParams(frequency_penalty=1.0), prompt_ids=[], vocab_size=VOCAB_SIZE)
    with_path, without = torch.zeros(VOCAB_SIZE), torch.zeros(VOCAB_SIZE)
    rules.apply(with_path, [0], [1, 1])
    rules.apply(without, [0], [])
    assert (with_path.tolist(), without.tolist()) == ([-1, -2, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0])


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
    rules = Penalties(params, prompt_ids=prompt_ids, vocab_size=VOCAB_SIZE)
    raw = [1.5, -0.5, 0.0, 2.0, -3.0, 0.25]
    output_ids = []
    for committed, path in steps:
        output_ids.extend(committed)
        shaped = torch.tensor(raw)
        rules.apply(shaped, output_ids, path)
        assert shaped.tolist() == pytest.approx(naive(raw, prompt_ids, output_ids + path, params), rel=1e-6, abs=1e-6)


def test_a_request_that_waits_holds_no_row_of_the_vocabulary():
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)

    def held():
        return sum(type(one) is torch.Tensor and one.numel() == 12345 for one in gc.get_objects())

    before = held()
    rules = Penalties(params, prompt_ids=[1], vocab_size=12345)
    assert held() == before
    rules.apply(torch.zeros(12345), [], [])
    assert held() == before + 2
