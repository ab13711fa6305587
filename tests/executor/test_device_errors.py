"""What an executor makes of a device's errors, wherever in the step they come up."""

from __future__ import annotations

import functools

import pytest
import torch

from forerun import SamplingParams
from forerun.errors import DeviceLostError
from tests.contract.drafters import NGRAM
from tests.engines import tiny_llm

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
PARTS = ["prepare_pass", "forward", "verify", "move_accepted"]


@functools.cache
def plain():
    return tiny_llm().generate(PROMPTS, GREEDY, use_tqdm=False)


def raising_once(function, error, *, call):
    """The function, but for the given call of it, which raises."""
    calls = []

    def raising(*args, **options):
        calls.append(function)
        if len(calls) == call:
            raise error
        return function(*args, **options)

    return raising


def failing(llm, part, error, *, call):
    """An LLM whose executor raises once, at the given call of one part of a step."""
    setattr(llm.executor, part, raising_once(getattr(llm.executor, part), error, call=call))
    return llm


@pytest.mark.parametrize("part", PARTS)
def test_memory_that_one_step_lacks_costs_one_request(part):
    assert_one_is_lost(failing(tiny_llm(NGRAM), part, NO_MEMORY, call=3))


@pytest.mark.parametrize("call", [1, 3, 5])
def test_so_it_does_where_the_device_has_its_own_tables(call, monkeypatch):
    plain()  # by the same model, before it fails
    llm = tiny_llm(NGRAM, device_step=True)
    model = llm.executor.model
    monkeypatch.setattr(model, "forward", raising_once(model.forward, NO_MEMORY, call=call))
    assert_one_is_lost(llm)


def assert_one_is_lost(llm):
    """Of two requests one ends with an error; the other's text is its own, and so are later ones."""
    expected = plain()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    failed = [output.error is not None for output in outputs]
    assert failed.count(True) == 1
    survivor = failed.index(False)
    assert outputs[survivor].outputs[0].token_ids == expected[survivor].outputs[0].token_ids
    assert "2.00 GiB more were asked for" in outputs[1 - survivor].error
    (again,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize("part", [*PARTS, "draft"])
def test_a_device_that_is_lost_ends_the_call(part):
    llm = failing(tiny_llm(NGRAM), part, LOST, call=2)
    with pytest.raises(DeviceLostError, match="an illegal memory access was encountered"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_memory_that_drafting_lacks_costs_the_drafts_alone():
    expected = tiny_llm().generate(PROMPTS, GREEDY, use_tqdm=False)
    llm = failing(tiny_llm(NGRAM), "draft", NO_MEMORY, call=2)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [one.outputs[0].token_ids for one in expected]
    assert llm.stats.num_failed_drafts == 1


def test_an_error_of_the_code_stays_what_it_is():
    llm = failing(tiny_llm(), "forward", RuntimeError("mat1 and mat2 shapes cannot be multiplied"), call=1)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
