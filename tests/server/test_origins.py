"""Texts cut at their tokens' borders: nothing lost, the right token, and work that grows with the text alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.tokenizer import TextStream, load_tokenizer
from forerun.server.origins import TokenSpans
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def byte_ids(tokenizer, data):
    """Token ids of bytes, which need not be whole characters."""
    spellings = tokenizer.vocabulary(tokenizer.vocab_size).spellings
    ids = {spelling: token_id for token_id, spelling in spellings.items() if len(spelling) == 1}
    return [ids[bytes([byte])] for byte in data]


class CountedDecodes:
    """A tokenizer that counts what its `decode` is given."""

    def __init__(self, tokenizer):
        self.num_calls = self.num_tokens = 0
        self.special_token_ids = tokenizer.special_token_ids
        self.whole_text = tokenizer.whole_text
        self._decode = tokenizer.decode

    def decode(self, ids, **options):
        self.num_calls += 1
        self.num_tokens += len(ids)
        return self._decode(ids, **options)


def spans_of(tokenizer, prompt_ids, ids, *, num_held=0):
    """The spans of all deltas of a completion, token by token; `num_held` characters of text lag behind."""
    spans, text = TokenSpans(TextStream(tokenizer, prompt_ids).push), TextStream(tokenizer, prompt_ids)
    found, held = [], ""
    for place, token_id in enumerate(ids):
        held += text.push(token_id)
        given = len(held) if place == len(ids) - 1 else max(len(held) - num_held, 0)
        found += spans.cut(held[:given], [(token_id, place)])
        held = held[given:]
    return found


@pytest.mark.parametrize("num_tokens", [100, 1000])
@pytest.mark.parametrize("byte", [b"a", b"\xf0", b"\x80"])
def test_decoding_is_linear_even_after_a_prompt_that_ends_inside_a_character(tokenizer, num_tokens, byte):
    counted = CountedDecodes(tokenizer)
    spans = TokenSpans(TextStream(counted, byte_ids(tokenizer, b"ab\xf0")).push)
    for token_id in byte_ids(tokenizer, byte * num_tokens):
        spans.cut("", [(token_id, None)])
    assert counted.num_calls <= 2 * num_tokens + 10
    assert counted.num_tokens <= 64 * counted.num_calls


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it(tokenizer):
    ids = byte_ids(tokenizer, "a\U0001f600b".encode())
    assert spans_of(tokenizer, [], ids) == [("a", 0), ("\U0001f600", 4), ("b", 5)]


def test_a_character_that_the_prompt_began_belongs_to_the_token_that_completes_it(tokenizer):
    start, end = "\U0001f600".encode()[:1], "\U0001f600".encode()[1:]
    found = spans_of(tokenizer, byte_ids(tokenizer, start), byte_ids(tokenizer, end + b"b"))
    assert found == [("\U0001f600", 2), ("b", 3)]


@settings(deadline=None, max_examples=100)
@given(
    prompt=st.binary(max_size=6),
    parts=st.lists(st.one_of(st.binary(max_size=3), st.text("a\u00e9\u4f60\U0001f600", max_size=3).map(str.encode))),
    num_held=st.integers(0, 3),
)
def test_spans_join_to_the_text_whatever_lags_behind(tokenizer, prompt, parts, num_held):
    prompt_ids, ids = byte_ids(tokenizer, prompt), byte_ids(tokenizer, b"".join(parts))
    stream = TextStream(tokenizer, prompt_ids)
    text = "".join(map(stream.push, ids))
    found = spans_of(tokenizer, prompt_ids, ids, num_held=num_held)
    assert "".join(span for span, _ in found) == text
    assert [place for _, place in found] == sorted(place for _, place in found)


def test_a_prompt_that_ends_inside_a_character_holds_up_nobody(plain):
    """The attack: token ids that begin an emoji, then half characters for ever."""
    tokenizer = plain.llm.get_tokenizer()
    (half,) = byte_ids(tokenizer, b"\xf0")
    body = {
        "prompt": [half],
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": {str(half): 100},
        "forerun": {"origins": True},
    }
    (choice,) = plain.post("/v1/completions", body)["choices"]
    assert "".join(piece["text"] for piece in choice["forerun"]["pieces"]) == choice["text"]
    assert len(choice["forerun"]["origins"]) == 200
