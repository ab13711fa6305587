"""What a request predicts, as tokens: encoded as they would follow the prompt, and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.engine.request import continuation_ids
from forerun.errors import RequestError
from tests.engines import native_target, tiny_llm
from tests.native import needs_kernels

PROMPT = [3, 1, 4, 1, 5]


class Spaced:
    """A tokenizer in SentencePiece's manner: one token per character, and a text of its own begins with a space."""

    def encode(self, text, *, add_special_tokens=True):
        spaced = text if text.startswith("<") else " " + text
        return [ord(character) for character in spaced]

    def decode(self, ids, *, skip_special_tokens=True):
        text = "".join(map(chr, ids))
        return text.removeprefix(" ")


class Pairs:
    """A tokenizer that writes two equal characters as one token."""

    def encode(self, text, *, add_special_tokens=True):
        ids, at = [], 0
        while at < len(text):
            is_pair = text[at : at + 2] == 2 * text[at]
            ids.append(ord(text[at]) + 1000 * is_pair)
            at += 1 + is_pair
        return ids

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(chr(token_id % 1000) * (1 + token_id // 1000) for token_id in ids)


def test_a_continuation_gets_no_space_that_only_a_text_of_its_own_would_have():
    prompt_ids = Spaced().encode("say ")
    assert continuation_ids(Spaced(), prompt_ids, "yes") == [*map(ord, "yes")] != Spaced().encode("yes")


def test_a_continuation_that_would_grow_together_with_the_prompt_is_encoded_alone():
    prompt_ids = Pairs().encode("bal")
    assert continuation_ids(Pairs(), prompt_ids, "loon") == Pairs().encode("loon")
    assert continuation_ids(Pairs(), prompt_ids, "m") == Pairs().encode("m")


@needs_kernels
@pytest.mark.parametrize(
    ("prompt", "prediction"), [("say h", "ello"), ("say ", "hello"), ("é"[:1], "é"), ("<|im_end|>", "he")]
)
def test_with_a_real_tokenizer_a_continuation_spells_the_prediction(prompt, prediction):
    tokenizer = native_target().tokenizer
    assert tokenizer.decode(continuation_ids(tokenizer, tokenizer.encode(prompt), prediction)) == prediction


@needs_kernels
def test_a_prediction_that_starts_within_a_word_or_a_character_is_followed():
    llm = tiny_llm({"method": "ngram", "num_speculative_tokens": 4}, target=native_target())
    tokenizer, greedy = llm.get_tokenizer(), {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    for prompt_ids in (tokenizer.encode("say h"), tokenizer.encode("é")[:1]):
        (plain,) = llm.generate([prompt_ids], SamplingParams(**greedy), use_tqdm=False)
        text = plain.outputs[0].text
        for prediction in (text, text[1:], text[5:]):
            (output,) = llm.generate([prompt_ids], SamplingParams(**greedy, prediction=prediction), use_tqdm=False)
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
            assert output.outputs[0].prediction is not None


@pytest.fixture(scope="module")
def llm():
    return tiny_llm({"method": "ngram", "num_speculative_tokens": 4})


@pytest.mark.parametrize("prediction", [[1, 2], (1, 2), [np.int64(1), np.int32(2)]])
def test_token_ids_are_taken_as_they_are(llm, prediction):
    llm.engine.add_request("a", PROMPT, SamplingParams(prediction=prediction))
    (generation,) = llm.engine._requests["a"].generations
    llm.engine.abort("a")
    assert generation.spec.prediction_ids == (1, 2)
    assert all(type(token_id) is int for token_id in generation.spec.prediction_ids)


@pytest.mark.parametrize("prediction", [None, "", []])
def test_nothing_predicted_is_nothing_to_draft(llm, prediction):
    llm.engine.add_request("a", PROMPT, SamplingParams(prediction=prediction))
    (generation,) = llm.engine._requests["a"].generations
    llm.engine.abort("a")
    assert generation.spec.prediction_ids == ()


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([1, 97], "prediction: got token id 97; must be from 0 to 96"),
        ([-1], "prediction: got token id -1"),
        ([1] * 129, "prediction: got 129 tokens; may be at most max_model_len (128)"),
        ("a text", "prediction: a text needs a tokenizer"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused(llm, prediction, message):
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPT], SamplingParams(prediction=prediction), use_tqdm=False)
    assert str(caught.value).startswith(message)
    assert not llm.engine.has_work


def test_the_longest_prediction_is_as_long_as_the_longest_text(llm):
    (output,) = llm.generate([PROMPT], SamplingParams(prediction=[1] * 128, max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_a_tokens_text_is_decoded_once(llm):
    class Counting:
        num_decoded = 0

        def decode(self, ids, *, skip_special_tokens=True):
            self.num_decoded += 1
            return "".join(map(chr, ids))

    processor = replace(llm.engine.parts.processor, tokenizer=Counting())
    assert [processor.token_text(token_id) for token_id in (70, 71, 70, 70)] == ["F", "G", "F", "F"]
    assert processor.tokenizer.num_decoded == 2


def test_completions_share_their_stop_tokens(llm):
    """Thousands of them, kept for each of thousands of completions, would take gigabytes."""
    llm.engine.add_request("a", PROMPT, SamplingParams(n=3, stop_token_ids=[*range(10, 90)]))
    first, *others = llm.engine._requests["a"].generations
    llm.engine.abort("a")
    assert all(one.spec.stop_token_ids is first.spec.stop_token_ids for one in others)


def test_bad_words_are_encoded_once_for_all_prompts_of_a_request(llm):
    class Counting(Pairs):
        num_encoded = 0

        def encode(self, text, *, add_special_tokens=True):
            self.num_encoded += 1
            return super().encode(text)

    processor = replace(llm.engine.parts.processor, tokenizer=Counting())
    some, same, others = (SamplingParams(bad_words=words) for words in (["ab", "c"], ["ab", "c"], ["ab"]))
    found = [processor._bad_words(sampling) for sampling in (some, some, same)]
    assert found == [((97, 98), (99,))] * 3
    assert processor.tokenizer.num_encoded == 2 * 2
    assert processor._bad_words(others) == ((97, 98),)
    assert processor._bad_words(SamplingParams()) == ()
