"""Grammars over the tiny tokenizer, whose tokens are bytes, and a small grammar of plain Python."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace

import pytest
import torch

from forerun.core.structured_outputs import StructuredOutputs
from forerun.grammar.cache import GrammarCache
from forerun.models.tokenizer import load_tokenizer
from tests.engines import native_target
from tests.stand_in import VOCAB_SIZE
from tests.tiny_tokenizer import save_tiny_tokenizer

pytest.importorskip("llguidance")

EOS = 2
"""<|im_end|>, which spells no text."""

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}


@functools.cache
def text_target():
    """A tiny model on the native kernels whose texts end with a token of no text."""
    return replace(native_target(), eos_token_ids=frozenset({EOS}))


@functools.cache
def tokenizer():
    """The tokenizer of `text_target`."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(save_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE))


@functools.cache
def grammars():
    """The grammars of `text_target`."""
    return GrammarCache(tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))


def encode(text):
    """Token ids of a text."""
    return tokenizer().encode(text)


def begin(**wanted):
    """A sequence's grammar at its beginning."""
    return grammars().begin(StructuredOutputs(**wanted))


class OneOf:
    """The texts of a list, as token ids; for tests that need no tokenizer."""

    def __init__(self, texts, *, vocab_size, forced=()):
        self.texts = texts
        self.vocab_size = vocab_size
        self.free = list(forced)
        self.takes_drafts = True

    def allowed(self, output_ids, path=()):
        text = (*output_ids, *path)
        next_ids = {t[len(text)] for t in self.texts if len(t) > len(text) and t[: len(text)] == text}
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[sorted(next_ids)] = True
        return mask

    def num_possible(self, output_ids, path):
        lengths = range(len(path), 0, -1)
        return next((n for n in lengths if self.allowed(output_ids, path[: n - 1])[path[n - 1]]), 0)

    def forced(self, output_ids):
        return self.free
