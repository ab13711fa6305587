"""Byte-level tokenizers built from GGUF metadata give, on odd texts, the ids of the classes that the original models use."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from forerun.models.gguf.tokenizer import build_tokenizer
from tests.gguf_bytes import ARRAY, STRING, Key, gguf_bytes
from tests.models.gguf.test_tokenizer import TEXTS
from tests.odd_texts import odd_texts

WHOLE_WORDS = ("Hello", "Ġworld", "naÃ¯ve", "CamelCase")
"""In GPT-2's letters; no merges lead to them."""


@functools.cache
def trained(pre):
    """A vocabulary and its merges, learnt from the odd texts as they are cut, and a few whole words."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre].pre_tokenizer()
    if normalizer := PRE_TOKENIZERS[pre].normalizer():
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*odd_texts(), "Hello world, don't 1234 CamelCaseWORD " * 20], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    words = dict.fromkeys([*sorted(model["vocab"], key=model["vocab"].get), *WHOLE_WORDS])
    return {word: index for index, word in enumerate(words)}, [tuple(merge) for merge in model["merges"]]


def qwen2(vocab, merges):
    return Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer, merges


def granite(vocab, merges):
    """StarCoder's and Granite's tokenizer.json: GPT-2's, but each digit is a word."""
    backend = GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend, merges


def tiktoken(pattern=None):
    """A vocabulary of ranks, as Llama 3 and Mistral publish theirs, of which transformers finds the merges."""

    def original(vocab, merges):
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        ranks = {bytes(byte_of[letter] for letter in word): rank for word, rank in vocab.items()}

        class Converter(TikTokenConverter):
            @staticmethod
            def load_tiktoken_bpe(tiktoken_url):
                return ranks

        backend = Converter(**({"pattern": pattern} if pattern else {})).converted()
        return backend, [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]

    return original


ORIGINALS = {
    "qwen2": qwen2,
    "llama-bpe": tiktoken(),
    "tekken": tiktoken(GGUF_PRE_TOKENIZER_SPLITS["tekken"]),
    "refact": granite,
}


@pytest.fixture(scope="module", params=ORIGINALS)
def pair(request, tmp_path_factory):
    """Our tokenizer and the original."""
    vocab, merges = trained(request.param)
    theirs, merges = ORIGINALS[request.param](vocab, merges)
    keys = [
        Key("general.architecture", STRING, "llama"),
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.pre", STRING, request.param),
        Key("tokenizer.ggml.tokens", ARRAY, list(vocab), STRING),
        Key("tokenizer.ggml.merges", ARRAY, [" ".join(merge) for merge in merges], STRING),
    ]
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    path.write_bytes(gguf_bytes(keys))
    return build_tokenizer(open_gguf(path))[0], theirs


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_odd_texts_have_the_original_ids(pair):
    ours, theirs = pair
    assert [text for text in odd_texts() if ids(ours, text) != ids(theirs, text)] == []
    assert max(max(ids(ours, text), default=0) for text in odd_texts()) > 400, "merges were meant to be made"


@settings(max_examples=100)
@given(text=TEXTS)
def test_any_text_has_the_original_ids(pair, text):
    ours, theirs = pair
    assert ids(ours, text) == ids(theirs, text)
    assert ours.decode(ids(ours, text)) == theirs.decode(ids(theirs, text))
