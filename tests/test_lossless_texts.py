"""On a CPU what `tests/gpu/test_lossless.py` asks of a GPU, with few prompts; and that a text which differs is found."""

from __future__ import annotations

import functools

import pytest

from tests.contract.drafters import CASES
from tests.engines import tiny_target
from tests.lossless_texts import DRAFTERS, differing, prompts, sampling, texts

COUNT = 12


@functools.cache
def plain(seeded):
    return texts(tiny_target(), "plain", COUNT, seeded=seeded)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("device_step", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", ["ngram", "recycle", "eagle3-dynamic-tree"])
def test_no_text_differs_from_the_plain_one(name, device_step, seeded):
    assert differing(texts(tiny_target(), name, COUNT, seeded=seeded, device_step=device_step), plain(seeded)) == {}


def test_a_thousand_prompts_are_all_of_them_asked_and_many_are_different():
    asked = prompts(1000)
    assert len(asked) == 1000
    assert len({tuple(prompt) for prompt in asked}) > 900
    assert len({params.seed for params in sampling(1000, seeded=True)}) == 1000
    assert {params.temperature for params in sampling(1000, seeded=False)} == {0}


def test_a_text_that_differs_is_found_with_its_first_wrong_token():
    expected = [[1, 2, 3], [4, 5], [6]]
    assert differing([[1, 2, 4], [4, 5], [6, 7]], expected) == {0: 2, 2: 1}


def test_a_verifier_that_lets_wrong_tokens_stand_is_found(monkeypatch):
    lossy = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    monkeypatch.setitem(CASES, "lossy", CASES["bad"] | lossy)
    assert differing(texts(tiny_target(), "lossy", COUNT, seeded=False), plain(False))


def test_the_drafters_are_those_of_the_contract_each_once():
    assert set(DRAFTERS) < CASES.keys()
    assert len(set(DRAFTERS)) == len(DRAFTERS)
