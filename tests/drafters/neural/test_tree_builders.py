"""Trees built from one prediction per depth: which tokens they hold, and in which order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sampling_params import SamplingParams
from forerun.drafters.base import DraftRequest
from forerun.drafters.neural.parallel import DynamicTreeBuilder, StaticTreeBuilder
from forerun.drafters.neural.sampling import DraftSampler
from forerun.drafters.neural.tree import DynamicTree, parse_tree
from forerun.ops.sampling import SamplingRules
from tests.drafters.texts import sequence

V = 7


def random_logits(depth, *, rows=1, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(rows, V, generator=source) for _ in range(depth)]


def request(*, max_tokens=99, max_depth=99, rules=None, seed=0):
    return DraftRequest(sequence([1, 2, 3], seq_id=seed), max_tokens, max_depth, rules=rules)


def static(shape, method="greedy", target_ids=None):
    return StaticTreeBuilder(DraftSampler(method, vocab_size=V, target_ids=target_ids), parse_tree(shape))


def dynamic(top_k, depth, target_ids=None):
    return DynamicTreeBuilder(
        DraftSampler("greedy", vocab_size=V, target_ids=target_ids), DynamicTree(top_k=top_k, depth=depth)
    )


def paths_of(draft):
    return [tuple(draft.token_ids[above] for above in draft.path(node)) for node in range(len(draft))]


def test_a_chain_is_the_likeliest_token_of_each_depth_and_has_no_parents():
    logits = random_logits(3, rows=2)
    chain = static([[0], [0, 0], [0, 0, 0]])
    for row, draft in enumerate(chain.build([request(), request(seed=1)], logits)):
        assert draft.parents is None
        assert list(draft.token_ids) == [int(own[row].argmax()) for own in logits]


def test_the_rank_in_a_static_tree_is_the_rank_in_its_depths_prediction():
    shape = parse_tree([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]])
    logits = random_logits(3)
    (draft,) = StaticTreeBuilder(DraftSampler("greedy", vocab_size=V, target_ids=None), shape).build(
        [request()], logits
    )
    ranked = [own[0].argsort(descending=True).tolist() for own in logits]
    assert paths_of(draft) == [tuple(ranked[level][rank] for level, rank in enumerate(path)) for path in shape.paths]


def test_limits_of_a_request_cut_its_draft_and_no_other():
    builder, logits = static([2, 2]), random_logits(2, rows=3)
    whole, narrow, shallow = builder.build([request(), request(max_tokens=2), request(max_depth=1)], logits)
    assert [len(whole), len(narrow), len(shallow)] == [6, 2, 2]
    assert whole == builder.build([request()], [own[:1] for own in logits])[0]


@pytest.mark.parametrize("builder", [static([2, 2]), dynamic(2, 2)])
@pytest.mark.parametrize("limits", [{"max_tokens": 0}, {"max_depth": 0}])
def test_a_request_that_wants_nothing_gets_nothing(builder, limits):
    assert len(builder.build([request(**limits)], random_logits(2))[0]) == 0
    assert len(builder.build([request(**limits)], [])[0]) == 0


@pytest.mark.parametrize(
    "builder",
    [static([2, 1], target_ids=torch.tensor([5, 3, 6])), dynamic(2, 2, target_ids=torch.tensor([5, 3, 6]))],
)
def test_tokens_of_a_reduced_vocabulary_are_given_in_the_targets_ids(builder):
    logits = [torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[9.0, 0.0, 1.0]])]
    (draft,) = builder.build([request(max_tokens=4)], logits)
    assert {(3,), (6,), (3, 5), (6, 5)} == set(paths_of(draft))


def test_drawn_siblings_differ_and_each_has_the_distribution_it_was_drawn_from():
    rules = SamplingRules(SamplingParams(temperature=1.0), prompt_ids=[1, 2, 3], vocab_size=V)
    logits = random_logits(2)
    (draft,) = static([3, 2], "probabilistic").build([request(rules=rules)], logits)
    assert draft.probs.shape == (9, V)
    for parent, children in enumerate(draft.children()):
        probs = logits[0 if parent == 0 else 1][0].softmax(-1)
        for child in children:
            assert torch.allclose(draft.probs[child], probs)
            probs = probs.index_fill(0, torch.tensor(draft.token_ids[child]), 0.0)
            probs = probs / probs.sum()
    below = {tuple(draft.token_ids[child] for child in draft.children()[node + 1]) for node in range(3)}
    assert len(below) > 1, "each node draws for itself"


def test_greedy_and_sampled_requests_share_a_step():
    rules = SamplingRules(SamplingParams(temperature=1.0), prompt_ids=[1, 2, 3], vocab_size=V)
    logits = random_logits(2, rows=2)
    greedy, drawn = static([2, 1], "probabilistic").build([request(), request(rules=rules)], logits)
    assert greedy == static([2, 1]).build([request()], [own[:1] for own in logits])[0]
    assert drawn.probs is not None


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 4), top_k=st.integers(1, V), max_tokens=st.integers(1, 30))
def test_a_dynamic_tree_holds_the_most_probable_of_all_paths(seed, depth, top_k, max_tokens):
    logits = random_logits(depth, seed=seed)
    logprobs = [own[0].double().log_softmax(-1).tolist() for own in logits]
    best = [sorted(range(V), key=lambda token, own=own: -own[token])[:top_k] for own in logprobs]
    every = [path for length in range(1, depth + 1) for path in itertools.product(*best[:length])]
    score = {path: math.fsum(own[token] for own, token in zip(logprobs, path, strict=False)) for path in every}
    expected = sorted(every, key=score.__getitem__, reverse=True)[:max_tokens]
    (draft,) = dynamic(top_k, depth).build([request(max_tokens=max_tokens)], logits)
    found = paths_of(draft)
    assert len(set(found)) == len(found)
    assert [score[path] for path in found] == pytest.approx([score[path] for path in expected], abs=1e-4)


def test_a_dynamic_tree_respects_the_depth_of_a_request():
    logits = random_logits(4)
    (draft,) = dynamic(2, 4).build([request(max_depth=2)], logits)
    assert draft.depth == 2
    assert len(draft) == 6


def test_a_dynamic_tree_holds_no_token_without_a_chance():
    logits = [torch.tensor([[0.0, 1.0] + [-torch.inf] * (V - 2)])] * 2
    (draft,) = dynamic(4, 2).build([request()], logits)
    assert sorted(paths_of(draft)) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
