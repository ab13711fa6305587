"""P-EAGLE: what its head drafts in the engine is what the formulas say in one pass over the text and masks, computed anew."""

from __future__ import annotations

import logging

import pytest
import torch

from forerun import SamplingParams
from forerun.errors import ConfigError, ModelError
from tests import heads_eagle
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded, recorded_under_pressure
from tests.drafters.test_eagle import features_of
from tests.engines import engine_of, tiny_llm, tiny_target
from tests.models.heads import dense

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
K = 4

KINDS = {
    "plain": {},
    "whole vocabulary": {"num_draft": 97},
    "own embedding": {"own_embedding": True},
    "narrower than the target": {"own_embedding": True, "width": 40},
    "two layers": {"num_layers": 2},
    "two hidden states": {"num_aux": 2},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
}


def config_of(folder, *, method="peagle", **options):
    """A speculative_config over a fresh checkpoint."""
    heads_eagle.save(folder, *heads_eagle.peagle(tiny_target(), **options))
    return {"method": method, "model": str(folder), "num_speculative_tokens": K}


def expected(text, count, **options):
    """The formulas' logits [count, vocab_size] after a text."""
    model = tiny_target().model
    head = dense.DenseEagle3(
        *heads_eagle.peagle(tiny_target(), **options), embed=model.embed(torch.arange(model.vocab_size))
    )
    return dense.parallel_logits(head, features_of(text), text, count)


def assert_drafts_are_those_of_the_formulas(seen, *, least, **options):
    checked = 0
    for text, draft in seen[:: max(1, len(seen) // 40)]:
        if draft.token_ids:
            assert list(draft.token_ids) == expected(text, len(draft), **options).argmax(-1).tolist(), text
            checked += len(draft)
    assert checked >= least


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas_computed_anew(kind, tmp_path):
    llm = tiny_llm(config_of(tmp_path, **KINDS[kind]))
    seen = recorded(llm)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert_drafts_are_those_of_the_formulas(seen, least=80, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_their_logits(kind, tmp_path):
    llm = tiny_llm(config_of(tmp_path, **KINDS[kind]))
    seen, passes, predictions = recorded(llm), engine_of(llm).drafting.drafter._passes, []
    forward = passes.forward

    def spy(rows):
        predictions.append(forward(rows))
        return predictions[-1]

    passes.forward = spy
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    ids = slice(None) if passes.predictor.target_ids is None else passes.predictor.target_ids
    (text, draft), got = seen[2], predictions[2].logits
    torch.testing.assert_close(got, expected(text, len(draft), **KINDS[kind])[:, ids], rtol=1e-4, atol=1e-4)


def test_also_after_prefix_hits_preemption_and_chunks(tmp_path):
    llm = tiny_llm(config_of(tmp_path), **TIGHT)
    seen = recorded_under_pressure(llm, PROMPTS[:16], GREEDY)
    assert_drafts_are_those_of_the_formulas(seen, least=80)


def test_speculators_layout_is_the_same_head(tmp_path):
    head = heads_eagle.peagle(tiny_target())
    heads_eagle.save(tmp_path, *heads_eagle.in_speculators_layout(*head, kind="peagle"))
    llm = tiny_llm({"method": "peagle", "model": str(tmp_path), "num_speculative_tokens": K})
    seen = recorded(llm)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert_drafts_are_those_of_the_formulas(seen, least=80)


def test_other_spellings_of_the_same(tmp_path):
    config, tensors = heads_eagle.peagle(tiny_target())
    config["ptd_token_id"] = config.pop("mask_token_id")
    heads_eagle.save(tmp_path, config, dict(tensors) | {"mask_hidden": tensors["mask_hidden"][0]})
    llm = tiny_llm({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": K, "parallel_drafting": True})
    seen = recorded(llm)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert_drafts_are_those_of_the_formulas(seen, least=80)


@pytest.mark.parametrize(("num_tokens", "is_warned"), [(4, False), (6, True)])
def test_more_tokens_than_were_trained_are_warned_of(num_tokens, is_warned, tmp_path, caplog):
    head = heads_eagle.in_speculators_layout(*heads_eagle.peagle(tiny_target()), kind="peagle")
    heads_eagle.save(tmp_path, *head)
    with caplog.at_level(logging.WARNING):
        tiny_llm({"method": "peagle", "model": str(tmp_path), "num_speculative_tokens": num_tokens})
    assert ("may be 6 tokens deep; this head was trained to draft 4 in a pass" in caplog.text) == is_warned


# --- bad input ------------------------------------------------------------------------------------


def damaged(folder, *, method="peagle", **damage):
    heads_eagle.save_damaged(folder, heads_eagle.peagle, tiny_target(), **damage)
    return {"method": method, "model": str(folder), "num_speculative_tokens": K}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            {"drop": ["mask_hidden"]},
            "has no mask_hidden, so it is not of P-EAGLE; if it is of EAGLE-3, set method='eagle3'",
        ),
        ({"method": "eagle3"}, "is of P-EAGLE; set method='peagle'"),
        ({"config": {"mask_token_id": None}}, "has none of mask_token_id, pard_token, ptd_token_id"),
        ({"config": {"mask_token_id": 97}}, "mask_token_id: got 97; must be a token id from 0 to 96"),
        (
            {"add": {"mask_hidden": torch.ones(1, 1, 96)}},
            r"mask_hidden has shape \[1, 1, 96\], the 3 features of the target are 144 wide",
        ),
        ({"add": {"extra": torch.ones(1)}}, "surplus tensor 'extra'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(damage, message, tmp_path):
    with pytest.raises(ModelError, match=message) as error:
        tiny_llm(damaged(tmp_path, **damage))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_drafting": False}, "got False with method 'peagle'; leave it out, or say 'eagle3'"),
        ({"parallel_drafting": 1}, "parallel_drafting: got 1; may be True or False"),
        ({"draft_tree": [2, 2]}, "draft_tree: has 6 nodes, num_speculative_tokens allows 4"),
        ({"max_model_len": 600}, "its checkpoint allows at most 512; lower it"),
    ],
)
def test_a_wrong_setting_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tiny_llm(config_of(tmp_path) | changes)
