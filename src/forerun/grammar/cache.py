"""The grammars of a model's requests: each is compiled once and kept while it is in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.core.structured_outputs import StructuredOutputs
from forerun.errors import ConfigError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.ops.grammar import Grammar

if TYPE_CHECKING:
    from forerun.grammar.compiler import CompiledGrammar, Compiler

MAX_CACHED = 32  # compiled grammars; the least recently used is dropped


class GrammarCache:
    """Compiles the grammars of one model, each once; llguidance is loaded with the first.

    Any thread may call. No lock is held while a grammar compiles, so one thread can prepare what the
    engine's own will find ready.

    Args:
        tokenizer: the model's, or None: grammars are then refused.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._compiled_lock = threading.Lock()

    def begin(self, wanted: StructuredOutputs) -> Grammar:
        """Return the grammar of one sequence, at its beginning.

        Raises:
            RequestError: the grammar cannot be compiled, or this model cannot serve any.
            ConfigError: llguidance is not installed.
        """
        compiled = self.prepare(wanted)
        from forerun.grammar.sequence import SequenceGrammar  # llguidance: only when it is needed

        return SequenceGrammar(compiled, eos_mask=self._eos_mask, eos_token_ids=self._eos_token_ids)

    def prepare(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile what a request's text must match, unless that was done before; raises as `begin`."""
        with self._compiled_lock:
            found = self._compiled.get(wanted)
            if found is not None and not found.is_exhausted:
                self._compiled.move_to_end(wanted)
                return found
        compiled = self._loaded_compiler().compile(wanted)
        with self._compiled_lock:
            self._compiled[wanted] = compiled
            self._compiled.move_to_end(wanted)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    @cached_property
    def _eos_mask(self) -> Tensor:
        """[vocab_size] bool, True for the tokens that end a text; one for all sequences."""
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[sorted(self._eos_token_ids)] = True
        return mask

    def _loaded_compiler(self) -> Compiler:
        """The compiler for this model's tokenizer; reading that takes about a second, once."""
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = self._load_compiler()
            return self._compiler

    def _load_compiler(self) -> Compiler:
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs: needs a tokenizer, but the model was loaded without one; leave it out"
            )
        if not self._eos_token_ids:
            raise RequestError(
                "structured_outputs: needs a token that ends the text, but the model has none; leave it out"
            )
        if find_spec("llguidance") is None:
            raise ConfigError("structured_outputs: llguidance is not installed; pip install 'forerun[structured]'")
        from forerun.grammar.compiler import Compiler  # llguidance: only when it is needed

        vocab_size = max(self._vocab_size, self._tokenizer.vocab_size)
        return Compiler(self._tokenizer.definition, vocab_size=vocab_size, eos_token_ids=self._eos_token_ids)
