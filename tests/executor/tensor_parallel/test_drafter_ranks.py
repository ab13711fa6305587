"""A drafter that several processes compute drafts what one process drafts, token for token."""

from __future__ import annotations

import gc
import os

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from tests.contract.drafters import CASES
from tests.engines import tiny_llm
from tests.native import needs_kernels
from tests.tensor_parallel import save_model, target_of, texts_and_drafts

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux shares memory so"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose three key heads lie on two ranks, so that both have the second."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(path):
    """The model in two processes."""
    return target_of(path, 2)


@pytest.mark.parametrize("name", ["draft-model-tree", "eagle", "eagle3", "peagle", "draft-model-foreign"])
def test_texts_and_drafts_of_two_ranks_are_those_of_one(two_ranks, name):
    found = [
        texts_and_drafts(tiny_llm(CASES[name] | {"draft_tensor_parallel_size": size}, target=two_ranks), count=6)
        for size in (1, 2)
    ]
    assert found[0] == found[1]
    assert any(token_ids for step in found[0][1] for token_ids, _ in step)


def test_the_parts_of_drafters_that_are_gone_are_dropped(two_ranks):
    leader = two_ranks.ranks._leader
    for _ in range(2):
        llm = tiny_llm(CASES["eagle3"] | {"draft_tensor_parallel_size": 2}, target=two_ranks)
        llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)
        del llm
        gc.collect()
    assert len(leader._dropped) == 4  # of the second engine: two caches, layers and a head


@pytest.mark.parametrize("method", ["medusa", "mlp-speculator", "dflash"])
def test_a_method_that_one_process_computes_is_refused(method):
    with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size: got 2; must be 1 with this method"):
        tiny_llm(CASES[method] | {"draft_tensor_parallel_size": 2})


def test_another_number_than_the_targets_is_refused(two_ranks):
    with pytest.raises(ConfigError, match=r"got 3; may be 1 or 2, which is tensor_parallel_size"):
        tiny_llm(CASES["eagle"] | {"draft_tensor_parallel_size": 3}, target=two_ranks)


def test_a_draft_model_with_experts_is_refused(two_ranks, tmp_path):
    draft = {
        "method": "draft_model",
        "model": str(save_model(tmp_path, "MixtralForCausalLM")),
        "num_speculative_tokens": 3,
    }
    with pytest.raises(ConfigError, match="got 2, but a mixture of experts computes in one process; set it to 1"):
        tiny_llm(draft | {"draft_tensor_parallel_size": 2}, target=two_ranks)


def test_it_is_refused_before_anything_is_loaded(path):
    with pytest.raises(ConfigError, match="got 2; may be 1, as tensor_parallel_size is 1"):
        LLM(str(path), speculative_config=CASES["draft-model"] | {"draft_tensor_parallel_size": 2})
