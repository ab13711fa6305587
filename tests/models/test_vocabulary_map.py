"""A model behind another's vocabulary reads each token as its own and judges by the logits of its own."""

from __future__ import annotations

import torch

from forerun.models.loader import load_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import parts_of
from forerun.models.vocabulary_map import VocabularyMappedModel, map_vocabulary
from tests.engines import VOCAB_SIZE, foreign_drafter, tiny_target
from tests.foreign import MARKS, byte_level, few_tokens, sentencepiece
from tests.models.paged_run import PagedRun


def mapped(target, draft, *, vocab_size=None):
    """The map between two transformers tokenizers."""
    target, draft = Tokenizer(parts_of(target)), Tokenizer(parts_of(draft))
    width = vocab_size or target.vocab_size
    return map_vocabulary(target.vocabulary(width), draft.vocabulary(draft.vocab_size), vocab_size=width)


def twins(*args, **kwargs):
    vocabulary_map = mapped(*args, **kwargs)
    return dict(zip(vocabulary_map.target_ids.tolist(), vocabulary_map.draft_ids.tolist(), strict=True))


def test_what_spells_the_same_bytes_is_paired_across_notations():
    target = byte_level([*MARKS, "Ġthe", "Ã©", "Ċ", "Ã", "x"])
    draft = sentencepiece(["<0xC3>", "▁the", *MARKS, "<0x0A>", "é", "y"])
    assert twins(target, draft) == {0: 2, 1: 3, 2: 4, 3: 1, 4: 6, 5: 5, 6: 0}


def test_no_token_has_two_twins():
    target = sentencepiece([*MARKS, "<0x41>", "A"])
    draft = sentencepiece(["A", "<0x41>", *MARKS])
    vocabulary_map = mapped(target, draft)
    assert vocabulary_map.target_ids.tolist() == [0, 1, 2, 4]
    assert vocabulary_map.draft_ids.tolist() == [2, 3, 4, 0]
    assert vocabulary_map.read_ids.tolist() == [2, 3, 4, 0, 0]


def test_a_special_token_is_never_the_twin_of_text():
    assert twins(
        byte_level([*MARKS, "a"]), sentencepiece(["<|im_end|>", "<s>", "</s>"], marks=("<s>", "</s>"), eos="</s>")
    ) == {
        0: 1,
        2: 2,
    }


def test_what_ends_and_begins_a_text_is_paired_whatever_it_is_called():
    target = byte_level(["<s>", "</s>", "a"], marks=("<s>", "</s>"), eos="</s>")
    assert twins(target, sentencepiece(["a", *MARKS])) == {0: 1, 1: 3, 2: 0}


def test_but_the_same_name_comes_first():
    target = byte_level(["<|endoftext|>", "<|im_end|>"], marks=("<|endoftext|>", "<|im_end|>"), eos="<|im_end|>")
    draft = sentencepiece(["<s>", "<|endoftext|>"], marks=("<s>", "<|endoftext|>"), eos="<|endoftext|>")
    vocabulary_map = mapped(target, draft)
    assert (vocabulary_map.target_ids.tolist(), vocabulary_map.draft_ids.tolist()) == ([0], [1])
    assert vocabulary_map.read_ids.tolist() == [1, 1], "an end is read as an end"


def test_what_has_no_twin_is_read_as_its_longest_ending():
    target = byte_level([*MARKS, "Ġgreat", "eat", "ððŁĺĢ", "zz"])
    draft = sentencepiece([*MARKS, "t", "at", "<0x80>"])
    assert mapped(target, draft, vocab_size=9).read_ids.tolist() == [0, 1, 2, 4, 4, 5, 0, 0, 0]


def behind_map(num_missing):
    """The tiny target's shuffled twin, as a model that speaks the target's tokens, and the map."""
    folder = foreign_drafter(VOCAB_SIZE, noise=0.0, num_missing=num_missing)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    draft = load_tokenizer(folder).vocabulary(model.vocab_size)
    vocabulary_map = map_vocabulary(few_tokens().vocabulary(VOCAB_SIZE), draft, vocab_size=VOCAB_SIZE)
    return VocabularyMappedModel(model, vocabulary_map), vocabulary_map


def test_a_shuffled_twin_gives_the_targets_logits():
    model, vocabulary_map = behind_map(num_missing=0)
    assert vocabulary_map.num_twins == VOCAB_SIZE
    token_ids = list(range(VOCAB_SIZE))
    expected = PagedRun(tiny_target().model).feed(token_ids).logits
    torch.testing.assert_close(PagedRun(model).feed(token_ids).logits, expected)


def test_tokens_without_a_twin_are_the_least_likely_there_can_be():
    model, vocabulary_map = behind_map(num_missing=15)
    num_twins = vocabulary_map.num_twins
    assert VOCAB_SIZE - 15 <= num_twins < VOCAB_SIZE
    logits = PagedRun(model).feed([1, 2, 3]).logits
    probs = logits.softmax(-1)
    assert (probs[:, vocabulary_map.target_ids] > 0).all()
    assert ((probs > 0).sum(-1) == num_twins).all()
    assert logits.isfinite().all(), "some rules leave such tokens only"


def test_it_is_the_model_it_is_made_of_but_for_the_vocabulary():
    model, _ = behind_map(num_missing=15)
    target = tiny_target().model
    for name in ("vocab_size", "hidden_size", "num_layers", "max_model_len", "kv_specs", "dtype", "device"):
        assert getattr(model, name) == getattr(target, name)
    result = PagedRun(model).feed([1, 2, 3], logits_rows=[2], features=frozenset({"last_hidden"}))
    assert result.logits.shape == (1, VOCAB_SIZE)
    assert result.features["last_hidden"].shape == (3, model.hidden_size)


def test_its_candidates_are_tokens_of_the_other_vocabulary():
    model, vocabulary_map = behind_map(num_missing=15)
    found = PagedRun(model).feed([1, 2, 3], num_candidates=4)
    assert torch.equal(found.candidates.logits, found.logits.topk(4).values)
    assert torch.equal(found.candidates.logits, found.logits.gather(1, found.candidates.token_ids.long()))
    assert set(found.candidates.token_ids.flatten().tolist()) <= set(vocabulary_map.target_ids.tolist())
