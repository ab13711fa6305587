"""A draft model of another tokenizer: with the target's own weights it is as right as the target itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import SamplingParams
from forerun.errors import ConfigError, UnknownKeyError
from forerun.models.vocabulary_map import VocabularyMappedModel
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.test_draft_model import GREEDY, SAMPLED, rate
from tests.engines import VOCAB_SIZE, engine_of, foreign_drafter, native_target, tiny_drafter, tiny_llm, tiny_target
from tests.foreign import MARKS, byte_level, few_tokens, sentencepiece
from tests.native import needs_kernels


def target(tokenizer=None):
    """The tiny target with a tokenizer."""
    return replace(tiny_target(), tokenizer=tokenizer or few_tokens())


def llm_with(model, *, of=None, limits=None, **settings):
    """The tiny target with a draft model, which may have another vocabulary."""
    config = {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": 5,
        "use_heterogeneous_vocab": True,
    }
    return tiny_llm(config | settings, target=of or target(), **limits or {})


def foreign_twin(vocab_size=VOCAB_SIZE):
    """The target's own weights behind another tokenizer that has all of its tokens."""
    return foreign_drafter(vocab_size, noise=0.0, num_missing=0)


def drafting_model(llm):
    return engine_of(llm).drafting.drafter._predictor._model


def test_a_shuffled_twin_is_always_right():
    assert rate(llm_with(foreign_twin()), PROMPTS[:8], GREEDY) == 1.0


def test_a_coupled_one_draws_what_the_target_draws():
    assert rate(llm_with(foreign_twin(), draft_sample_method="coupled"), PROMPTS[:8], SAMPLED) == 1.0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_its_probabilities_are_those_of_the_targets_tokens(method):
    settings = {"draft_sample_method": "probabilistic", "rejection_sample_method": method}
    assert rate(llm_with(foreign_twin(), **settings), PROMPTS[:8], SAMPLED) > 0.99


def test_where_sequences_are_preempted_and_prompts_chunked():
    llm = llm_with(foreign_twin(), limits=TIGHT)
    assert rate(llm, PROMPTS[:16], GREEDY) == 1.0
    assert engine_of(llm).scheduler.num_preemptions > 0


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_kernels_too(dtype):
    llm = llm_with(foreign_twin(264), of=native_target(dtype), draft_sample_method="coupled")
    assert drafting_model(llm).is_batch_invariant
    assert rate(llm, PROMPTS[:8], GREEDY) == 1.0
    assert rate(llm, PROMPTS[:8], SAMPLED) == 1.0


def test_a_request_that_allows_only_what_the_drafter_cannot_say_is_drafted_for():
    llm = llm_with(foreign_drafter(VOCAB_SIZE), draft_sample_method="coupled")
    said = set(drafting_model(llm)._target_ids.tolist())
    unsaid = [token_id for token_id in range(VOCAB_SIZE) if token_id not in said]
    sampling = SamplingParams(temperature=1, seed=1, max_tokens=12, ignore_eos=True, allowed_token_ids=unsaid)
    (output,) = llm.generate([PROMPTS[0]], sampling, use_tqdm=False)
    assert set(output.outputs[0].token_ids) <= set(unsaid)
    assert output.speculation.num_draft_tokens > 0
    assert engine_of(llm).drafting.num_failures == 0


# --- the same vocabulary --------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("flag", [False, True])
def test_of_the_same_tokens_nothing_is_translated(flag):
    llm = llm_with(tiny_drafter(264, noise=0.0), of=native_target(), use_heterogeneous_vocab=flag)
    assert not isinstance(drafting_model(llm), VocabularyMappedModel)


@needs_kernels
def test_the_same_tokens_with_more_padding_are_accepted_unasked(tmp_path):
    folder = tmp_path / "padded"
    shutil.copytree(tiny_drafter(264, noise=0.0), folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.randn(8, weights[name].shape[1])])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 272}))
    llm = llm_with(folder, of=native_target(), use_heterogeneous_vocab=False)
    assert rate(llm, PROMPTS[:8], GREEDY) == 1.0


# --- bad input ------------------------------------------------------------------------------------


def test_other_tokens_are_refused_with_the_way_out():
    message = r"has other tokens than the target .1 of 112 ids mean the same.; set use_heterogeneous_vocab=True"
    with pytest.raises(ConfigError, match=message):
        llm_with(foreign_drafter(VOCAB_SIZE), use_heterogeneous_vocab=False)


def test_as_many_but_other_tokens_are_refused_too(tmp_path):
    folder = tmp_path / "shifted"
    shutil.copytree(tiny_drafter(VOCAB_SIZE), folder)
    words = sorted(few_tokens().tokens, key=few_tokens().tokens.get)
    byte_level([words[-1], *words[:-1]]).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"0 of 97 ids mean the same.; set use_heterogeneous_vocab=True"):
        llm_with(folder, use_heterogeneous_vocab=False)
    assert isinstance(drafting_model(llm_with(folder)), VocabularyMappedModel)


def test_another_size_without_tokenizers_names_the_way_out():
    with pytest.raises(ConfigError, match=r"or use_heterogeneous_vocab=True .needs the tokenizers of both."):
        llm_with(foreign_drafter(VOCAB_SIZE), of=tiny_target(), use_heterogeneous_vocab=False)


def test_without_a_tokenizer_there_is_nothing_to_translate_by():
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab: got True, but the target has no tokenizer"):
        llm_with(foreign_drafter(VOCAB_SIZE), of=tiny_target())
    with pytest.raises(ConfigError, match=r"got True, but draft model .* has no tokenizer; both need one"):
        llm_with(tiny_drafter(VOCAB_SIZE))


def test_too_few_common_tokens_are_refused(tmp_path):
    folder = tmp_path / "hieroglyphs"
    shutil.copytree(tiny_drafter(VOCAB_SIZE), folder)
    sentencepiece([*MARKS, *"abcd", *(chr(0x13000 + i) for i in range(90))]).save_pretrained(folder)
    with pytest.raises(
        ConfigError, match=r"only 7 tokens of draft model .* must be 10% of the smaller vocabulary .94 t"
    ):
        llm_with(folder)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_flag_is_true_or_false(value):
    with pytest.raises(ConfigError, match=r"use_heterogeneous_vocab: got .*; may be True or False"):
        llm_with("tiny", use_heterogeneous_vocab=value)


def test_other_methods_do_not_know_the_key():
    with pytest.raises(UnknownKeyError, match="unknown key 'use_heterogeneous_vocab' for method 'ngram'"):
        tiny_llm({"method": "ngram", "use_heterogeneous_vocab": True})
