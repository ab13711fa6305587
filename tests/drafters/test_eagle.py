"""EAGLE heads: what they draft in the engine is what the formulas say about the whole text, computed anew."""

from __future__ import annotations

import functools

import pytest
import torch

from forerun import SamplingParams
from forerun.errors import ConfigError, ModelError
from tests import heads_eagle
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded, recorded_under_pressure
from tests.engines import engine_of, tiny_llm, tiny_target
from tests.models.heads import dense
from tests.models.paged_run import PagedRun

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
K = 4

KINDS = {
    "eagle": ("eagle", {}),
    "eagle with a bias": ("eagle", {"bias": True}),
    "eagle of two layers": ("eagle", {"num_layers": 2}),
    "eagle3": ("eagle3", {}),
    "eagle3 with the whole vocabulary": ("eagle3", {"num_draft": 97}),
    "eagle3 with its own embedding": ("eagle3", {"own_embedding": True}),
    "eagle3 narrower than the target": ("eagle3", {"own_embedding": True, "width": 40}),
    "eagle3 of two layers": ("eagle3", {"num_layers": 2}),
    "eagle3 on two hidden states": ("eagle3", {"num_aux": 2}),
    "eagle3, norm_before_residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3, norm_before_fc": ("eagle3", {"norm_before_fc": True}),
    "eagle3, fc_norm": ("eagle3", {"fc_norm": True}),
    "eagle3, norm_output": ("eagle3", {"norm_output": True}),
}


def config_of(kind, folder, **changes):
    """A speculative_config over a fresh checkpoint of this kind."""
    method, options = KINDS[kind]
    heads_eagle.save(folder, *getattr(heads_eagle, method)(tiny_target(), **options))
    return {"method": method, "model": str(folder), "num_speculative_tokens": K, **changes}


def dense_twin(kind):
    """The same head as formulas."""
    method, options = KINDS[kind]
    model = tiny_target().model
    ids = torch.arange(model.vocab_size)
    config, weights = getattr(heads_eagle, method)(tiny_target(), **options)
    if method == "eagle":
        return dense.DenseEagle(config, weights, embed=model.embed(ids), head=model.head_rows(ids))
    return dense.DenseEagle3(config, weights, embed=model.embed(ids))


@functools.cache
def features_of(text):
    """The target's features at each token of a text but the last."""
    names = frozenset({"last_hidden", *(f"hidden.{i}" for i in range(4))})
    with torch.inference_mode():
        return PagedRun(tiny_target().model).feed(list(text[:-1]), features=names).features


def assert_drafts_are_those_of_the_formulas(kind, seen, *, least):
    head, checked = dense_twin(kind), 0
    drafted = [(text, draft) for text, draft in seen if draft.token_ids]
    for text, draft in drafted[:: max(1, len(drafted) // 40)]:
        assert list(draft.token_ids) == dense.draft(head, features_of(text), text, len(draft)), text
        checked += len(draft)
    assert checked >= least


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas_computed_anew(kind, tmp_path):
    llm = tiny_llm(config_of(kind, tmp_path))
    seen = recorded(llm)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert_drafts_are_those_of_the_formulas(kind, seen, least=80)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_also_after_prefix_hits_preemption_and_chunks(kind, tmp_path):
    llm = tiny_llm(config_of(kind, tmp_path), **TIGHT)
    seen = recorded_under_pressure(llm, PROMPTS[:16], GREEDY)
    assert_drafts_are_those_of_the_formulas(kind, seen, least=80)


def test_also_where_cached_blocks_come_from_a_sequence_that_was_not_drafted_for(tmp_path):
    llm = tiny_llm(config_of("eagle3", tmp_path))
    off = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation="off")
    llm.generate(PROMPTS[:8], off, use_tqdm=False)
    seen = recorded(llm)
    llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    assert engine_of(llm).scheduler.num_cached_tokens > 0
    assert_drafts_are_those_of_the_formulas("eagle3", seen, least=80)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("tree", [[2, 2, 1], {"top_k": 1, "depth": 3}])
def test_the_first_path_of_a_tree_is_the_chain(kind, tree, tmp_path):
    llm = tiny_llm(config_of(kind, tmp_path, draft_tree=tree, num_speculative_tokens=20))
    seen = recorded(llm)
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    head = dense_twin(kind)
    for text, draft in seen[::5]:
        path = [0]
        while children := draft.children()[path[-1] + 1]:
            path.append(children[0])
        tokens = [draft.token_ids[node] for node in path]
        assert tokens == dense.draft(head, features_of(text), text, len(tokens))


def test_every_path_of_a_tree_is_what_the_head_says_after_it(tmp_path):
    llm = tiny_llm(config_of("eagle3", tmp_path, draft_tree=[2, 2, 2], num_speculative_tokens=14))
    seen = recorded(llm)
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    head, (text, draft) = dense_twin("eagle3"), seen[3]
    assert len(draft) == 14
    for node, children in zip([-1, *range(14)], draft.children(), strict=True):
        states, tokens = head.fuse(features_of(text)), list(text[1:])
        for above in draft.path(node):
            outputs = head.outputs(torch.tensor(tokens), states)
            states = torch.cat([states, head.states(outputs[-1:])])
            tokens.append(draft.token_ids[above])
        if children:
            best = head.logits(head.outputs(torch.tensor(tokens), states)[-1:]).topk(2).indices[0].tolist()
            assert [draft.token_ids[child] for child in children] == best


def test_a_dynamic_tree_holds_the_most_probable_paths(tmp_path):
    llm = tiny_llm(config_of("eagle3", tmp_path, draft_tree={"top_k": 3, "depth": 3}, num_speculative_tokens=6))
    seen = recorded(llm)
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    head, (text, draft) = dense_twin("eagle3"), seen[3]

    def children(path):
        """The three likeliest continuations of a path and their log probabilities."""
        states, tokens = head.fuse(features_of(text)), list(text[1:])
        for token in path:
            outputs = head.outputs(torch.tensor(tokens), states)
            states = torch.cat([states, head.states(outputs[-1:])])
            tokens.append(token)
        logits = head.logits(head.outputs(torch.tensor(tokens), states)[-1:])[0]
        best = logits.log_softmax(-1).topk(3)
        return zip(best.indices.tolist(), best.values.tolist(), strict=True)

    candidates, level = {}, {(): 0.0}
    for _ in range(3):
        grown = {(*path, token): score + more for path, score in level.items() for token, more in children(path)}
        candidates |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:3])
    best = sorted(candidates, key=candidates.get, reverse=True)[:6]
    paths = [tuple(draft.token_ids[above] for above in draft.path(node)) for node in range(len(draft))]
    assert paths == best


def test_a_head_beyond_its_own_maximum_drafts_nothing(tmp_path):
    llm = tiny_llm(config_of("eagle", tmp_path, max_model_len=30))
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    short, long = llm.generate([[1, 2, 3], list(range(40))], sampling, use_tqdm=False)
    assert long.speculation.num_draft_tokens == 0
    assert short.speculation.num_draft_tokens > 15
    assert [len(output.outputs[0].token_ids) for output in (short, long)] == [60, 60]


# --- bad input ------------------------------------------------------------------------------------


def damaged(folder, method, **damage):
    """A checkpoint with something wrong."""
    heads_eagle.save_damaged(folder, getattr(heads_eagle, method), tiny_target(), **damage)
    return {"method": method, "model": str(folder), "num_speculative_tokens": K}


@pytest.mark.parametrize(
    ("method", "damage", "message"),
    [
        ("eagle", {"drop": ["fc.weight"]}, "tensor 'fc.weight' is missing"),
        ("eagle", {"add": {"extra": torch.ones(1)}}, "surplus tensor 'extra'"),
        ("eagle", {"config": {"hidden_size": 40}}, "has hidden_size 40 and vocab_size 97, the target 48 and 97"),
        ("eagle", {"config": {"vocab_size": 100}}, "has hidden_size 48 and vocab_size 100, the target 48 and 97"),
        ("eagle", {"add": {"d2t": torch.zeros(3, dtype=torch.int64)}}, "is of EAGLE-3; set method='eagle3'"),
        ("eagle3", {"drop": ["d2t"]}, "has no d2t, but a draft vocabulary of 40 tokens for the target's 97"),
        ("eagle3", {"drop": ["lm_head.weight"]}, "a reduced vocabulary needs a head of its own"),
        ("eagle3", {"add": {"d2t": torch.full((40,), 90)}}, "draft token 7 is the target's 97; must be from 0 to 96"),
        ("eagle3", {"add": {"d2t": -torch.arange(40)}}, "two draft tokens are the same of the target"),
        ("eagle3", {"add": {"t2d": torch.ones(97, dtype=torch.bool)}}, "t2d: marks 97 tokens of the target, d2t 40"),
        ("eagle3", {"config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "got 9; must be from 0 to 3"),
        ("eagle3", {"config": {"target_hidden_size": 64}}, "is for a target of hidden_size 64, this one has 48"),
        (
            "eagle3",
            {"config": {"target_hidden_size": None, "hidden_size": 64}},
            "is for a target of hidden_size 64, this one has 48",
        ),
        ("eagle3", {"width": 40}, "'embed_tokens.weight' is missing, and the target's, of width 48"),
        ("eagle3", {"config": {"speculators_model_type": "eagle3"}}, "norm_before_residual is missing"),
        ("eagle3", {"config": {"num_hidden_layers": 2}}, "tensor 'layers.1"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(method, damage, message, tmp_path):
    with pytest.raises(ModelError, match=message) as error:
        tiny_llm(damaged(tmp_path, method, **damage))
    assert "\n" not in str(error.value)


def test_an_eagle_checkpoint_is_none_of_eagle3(tmp_path):
    config = config_of("eagle", tmp_path) | {"method": "eagle3"}
    with pytest.raises(ModelError):
        tiny_llm(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 600}, "its checkpoint allows at most 512; lower it"),
        ({"draft_tree": [3, 3]}, "draft_tree: has 12 nodes, num_speculative_tokens allows 4"),
        ({"draft_sample_method": "lucky"}, "may be greedy, probabilistic, coupled"),
    ],
)
def test_a_wrong_setting_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tiny_llm(config_of("eagle", tmp_path, **changes))
