"""The grammars of a model's requests: what is needed for them is loaded at the first, what was compiled is kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from forerun.core.structured_outputs import StructuredOutputs
from forerun.errors import ConfigError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.ops.grammar import Grammar

if TYPE_CHECKING:
    from forerun.engine.grammar_compiler import CompiledGrammar, Compiler

MOST_KEPT = 32  # compiled grammars; the one used longest ago is dropped


class Grammars:
    """Compiles each grammar once; `vocab_size` is the width of the logits.

    Any thread may call: nothing is locked while a grammar compiles, so that one thread can prepare
    what the engine's own will find ready.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._compiler: Compiler | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._keeping = threading.Lock()

    def begin(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar of one sequence, at its beginning.

        Raises:
            RequestError: the grammar cannot be compiled, or this model cannot serve any.
            ConfigError: llguidance is not installed.
        """
        compiled = self.prepare(wanted)
        from forerun.engine.grammar import SequenceGrammar

        return SequenceGrammar(compiled, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    def prepare(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile what a request's text must match, unless that was done before; raises as `begin`."""
        with self._keeping:
            found = self._kept.get(wanted)
            if found is not None and not found.is_exhausted:
                self._kept.move_to_end(wanted)
                return found
        compiled = self._loaded().compile(wanted)
        with self._keeping:
            self._kept[wanted] = compiled
            self._kept.move_to_end(wanted)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _loaded(self) -> Compiler:
        """The compiler for this model's tokenizer; reading that takes about a second, once."""
        with self._loading:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def _load(self) -> Compiler:
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
        from forerun.engine.grammar_compiler import Compiler  # llguidance: only when it is needed

        vocab_size = max(self._vocab_size, self._tokenizer.vocab_size)
        return Compiler(self._tokenizer.definition, vocab_size=vocab_size, eos_token_ids=self._eos_token_ids)
