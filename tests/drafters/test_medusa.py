"""Medusa and MLP speculators: what they draft in the engine is what the formulas say about each text."""

from __future__ import annotations

import itertools

import pytest
import torch

from forerun import SamplingParams
from forerun.errors import ConfigError, ModelError
from tests import heads_eagle, heads_medusa
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded, recorded_under_pressure
from tests.drafters.test_eagle import features_of
from tests.engines import engine_of, tiny_llm, tiny_target

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
K = 4

KINDS = {
    "medusa": ("medusa", {}),
    "medusa with its own vocabularies": ("medusa", {"vocabularies": "own"}),
    "medusa with a token map": ("medusa", {"num_draft": 40}),
    "mlp_speculator": ("mlp_speculator", {}),
    "mlp_speculator with tied weights": ("mlp_speculator", {"tie_weights": True, "scale_input": True}),
}
METHODS = ["medusa", "mlp_speculator"]


def checkpoint_of(kind):
    """(config, tensors) of this kind."""
    method, options = KINDS[kind]
    return getattr(heads_medusa, method)(tiny_target(), **options)


def config_of(kind, folder, **changes):
    """A speculative_config over a fresh checkpoint of this kind."""
    heads_eagle.save(folder, *checkpoint_of(kind))
    return {"method": KINDS[kind][0], "model": str(folder), "num_speculative_tokens": K, **changes}


def dense_logits(kind, text, path):
    """What the formulas say about the token after a text and the drafted `path`: [V]"""
    config, tensors = checkpoint_of(kind)
    hidden = features_of(text)["last_hidden"][-1]
    if KINDS[kind][0] == "mlp_speculator":
        return heads_medusa.dense_mlp(config, tensors, hidden, [text[-1], *path])
    model = tiny_target().model
    head = model.head_rows(torch.arange(model.vocab_size))
    return heads_medusa.dense_medusa(config, tensors, hidden[None], head=head)[len(path)][0]


def drafts_of(llm, prompts):
    """(committed text, draft) of every step."""
    seen = recorded(llm)
    llm.generate(prompts, GREEDY, use_tqdm=False)
    return seen


def assert_drafts_are_those_of_the_formulas(kind, seen, *, least):
    """Each node's children are the likeliest tokens after it, for some of the drafts."""
    checked = 0
    for text, draft in seen[:: max(1, len(seen) // 40)]:
        for node, children in zip(range(-1, len(draft)), draft.children(), strict=True):
            if children:
                path = [draft.token_ids[above] for above in draft.path(node)]
                best = dense_logits(kind, text, path).topk(len(children)).indices.tolist()
                assert [draft.token_ids[child] for child in children] == best, (text, path)
                checked += len(children)
    assert checked >= least


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas(kind, tmp_path):
    seen = drafts_of(tiny_llm(config_of(kind, tmp_path)), PROMPTS[:4])
    assert_drafts_are_those_of_the_formulas(kind, seen, least=80)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_step_after_a_prompt_is_drafted_for(method, tmp_path):
    text, draft = drafts_of(tiny_llm(config_of(method, tmp_path)), PROMPTS[:1])[0]
    assert len(text) == len(PROMPTS[0]) + 1
    assert len(draft) == K


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", [[2, 2, 1], [[0], [1], [2], [1, 0], [1, 0, 0], [1, 0, 1]]])
def test_every_path_of_a_tree_is_what_the_heads_say(method, tree, tmp_path):
    seen = drafts_of(tiny_llm(config_of(method, tmp_path, draft_tree=tree, num_speculative_tokens=20)), PROMPTS[:3])
    assert_drafts_are_those_of_the_formulas(method, seen, least=80)


@pytest.mark.parametrize("method", METHODS)
def test_also_after_prefix_hits_preemption_and_chunks(method, tmp_path):
    llm = tiny_llm(config_of(method, tmp_path), **TIGHT)
    seen = recorded_under_pressure(llm, PROMPTS[:16], GREEDY)
    assert_drafts_are_those_of_the_formulas(method, seen, least=80)


def test_a_dynamic_tree_of_medusa_holds_the_most_probable_paths(tmp_path):
    llm = tiny_llm(config_of("medusa", tmp_path, draft_tree={"top_k": 3, "depth": 4}, num_speculative_tokens=9))
    for text, draft in drafts_of(llm, PROMPTS[:2])[::4]:
        levels = [dense_logits("medusa", text, [0] * depth).log_softmax(-1) for depth in range(4)]
        kept = [own.topk(3).indices.tolist() for own in levels]
        every = [path for length in range(1, 5) for path in itertools.product(*kept[:length])]
        score = {path: sum(float(own[token]) for own, token in zip(levels, path, strict=False)) for path in every}
        paths = [tuple(draft.token_ids[above] for above in draft.path(node)) for node in range(len(draft))]
        assert set(paths) == set(sorted(every, key=score.__getitem__, reverse=True)[: len(paths)])


@pytest.mark.parametrize("method", METHODS)
def test_it_takes_no_kv_but_that_of_the_features(method, tmp_path):
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    plain, drafted = (
        engine_of(tiny_llm(config, **settings)).pool.num_blocks for config in (None, config_of(method, tmp_path))
    )
    model = tiny_target().model
    kv = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in model.kv_specs)
    assert drafted == pytest.approx(plain * kv / (kv + model.hidden_size), abs=2)


# --- bad input ------------------------------------------------------------------------------------


def damaged(folder, method, **damage):
    """A checkpoint with something wrong."""
    heads_eagle.save_damaged(folder, getattr(heads_medusa, method), tiny_target(), **damage)
    return {"method": method, "model": str(folder), "num_speculative_tokens": K}


@pytest.mark.parametrize(
    ("method", "damage", "message"),
    [
        ("medusa", {"drop": ["2.0.linear.weight"]}, "surplus tensor '2.0.linear.bias'"),
        ("medusa", {"drop": ["2.1.weight"], "vocabularies": "own"}, "tensor '2.lm_head.weight' is missing"),
        ("medusa", {"add": {"extra": torch.ones(1)}}, "surplus tensor 'extra'"),
        ("medusa", {"add": {"0.0.linear.weight": torch.ones(64, 64)}}, "of hidden_size 64, this one has 48"),
        ("medusa", {"add": {"1.0.linear.weight": torch.ones(64, 64)}}, r"has shape \[64, 64\], expected \[48, 48\]"),
        (
            "medusa",
            {"add": {"0.1.weight": torch.ones(99, 48)}, "vocabularies": "own"},
            "a vocabulary of 99 tokens, the target has 97",
        ),
        ("medusa", {"config": {"medusa_num_layers": 3}, "num_blocks": 2}, "got 3, the checkpoint has 2"),
        ("medusa", {"config": {"medusa_num_layers": "one"}}, "medusa_num_layers: got 'one'"),
        (
            "medusa",
            {"drop": ["token_map"], "num_draft": 40},
            "truncated_vocab_size: got 40, the checkpoint has tokens for 97",
        ),
        (
            "medusa",
            {"config": {"truncated_vocab_size": 50}, "num_draft": 40},
            "got 50, the checkpoint has tokens for 40",
        ),
        (
            "medusa",
            {"add": {"token_map": torch.arange(60, 100)}, "num_draft": 40},
            "token_map: draft token 37 is the target's 97",
        ),
        (
            "medusa",
            {"add": {"token_map": torch.zeros(40)}, "num_draft": 40},
            "token_map: two draft tokens are the same",
        ),
        ("mlp_speculator", {"drop": ["emb.2.weight"]}, "tensor 'emb.2.weight' is missing"),
        ("mlp_speculator", {"drop": ["head.0.weight"], "tie_weights": True}, "tensor 'head.0.weight' is missing"),
        (
            "mlp_speculator",
            {"drop": ["proj.1.weight"], "tie_weights": True, "inner_dim": 48},
            "'proj.1.weight' is missing",
        ),
        ("mlp_speculator", {"add": {"emb.4.weight": torch.ones(97, 40)}}, "surplus tensor 'emb.4.weight'"),
        ("mlp_speculator", {"config": {"emb_dim": 64}}, "has emb_dim 64 and vocab_size 97, the target hidden_size 48"),
        ("mlp_speculator", {"config": {"vocab_size": 100}}, "has emb_dim 48 and vocab_size 100"),
        ("mlp_speculator", {"config": {"n_predict": None}}, "n_predict: got None; must be an integer of 1 or more"),
        ("mlp_speculator", {"config": {"inner_dim": 32}}, r"expected \[97, 32\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(method, damage, message, tmp_path):
    with pytest.raises(ModelError, match=message) as error:
        tiny_llm(damaged(tmp_path, method, **damage))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [("medusa", "has no Medusa heads"), ("mlp_speculator", "use an MLP speculator's checkpoint")],
)
def test_a_checkpoint_of_another_method_is_refused(method, message, tmp_path):
    heads_eagle.save(tmp_path, *heads_eagle.eagle(tiny_target()))
    with pytest.raises(ModelError, match=message):
        tiny_llm({"method": method, "model": str(tmp_path), "num_speculative_tokens": K})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_speculative_tokens": 5},
            "num_speculative_tokens: got 5; the checkpoint predicts 4 tokens ahead; lower it",
        ),
        (
            {"draft_tree": [1, 1, 1, 1, 1], "num_speculative_tokens": 9},
            "draft_tree: is 5 levels deep; the checkpoint predicts 4",
        ),
        ({"draft_tree": {"top_k": 2, "depth": 5}}, "draft_tree: is 5 levels deep"),
        ({"draft_tree": [3, 3]}, "draft_tree: has 12 nodes, num_speculative_tokens allows 4"),
        (
            {"draft_tree": {"top_k": 2, "depth": 2}, "draft_sample_method": "coupled"},
            "got 'coupled' with a dynamic draft_tree",
        ),
        ({"draft_sample_method": "lucky"}, "may be greedy, probabilistic, coupled"),
        ({"num_speculative_tokens": None}, "has no default"),
        ({"max_model_len": 30}, "unknown key 'max_model_len'"),
    ],
)
def test_a_wrong_setting_is_refused(method, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tiny_llm(config_of(method, tmp_path, **changes))
