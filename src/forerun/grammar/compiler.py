"""Compiles grammars with llguidance, none of which may stop or hold up the engine."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray

from forerun.core.structured_outputs import StructuredOutputs
from forerun.errors import RequestError
from forerun.grammar import sandbox, structural_tags

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

MATCHER_LIMITS = {
    "initial_lexer_fuel": 500_000,  # work on regexes while compiling
    "max_grammar_size": 100_000,  # symbols
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "step_lexer_fuel": 200_000,  # work on regexes for one mask, about 14 ms
    "step_max_items": 50_000,  # work on rules for one mask, about 3 ms
}
NO_FORCING = '%llguidance {"no_forcing": true}'
"""The last word of a user's grammar: llguidance follows bytes that must come as far as they go, with no limit, and after
`start: /b+/ "b"` they go on for ever, as the terminal takes each of them."""

SPECIAL_MARKER = b"\xff"
"""Before the name of a special token, among the bytes that must come."""

SANDBOX_TIMEOUT_S = 30.0  # the sandbox limits its own CPU time; this is for a machine that gives it none
MAX_COMPLAINT = 300  # characters of llguidance's message that are repeated
MAX_WARNINGS = 100  # different ones in the log

_warned: set[str] = set()

_private_compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forerun-grammar")
"""Compiles the private matchers of running sequences; llguidance lets go of Python's lock meanwhile."""


class Compiler:
    """Compiles for one tokenizer.

    Args:
        definition: the tokenizer, as tokenizer.json; tokens that end a text are special whatever it says of them.
        vocab_size: width of the masks, at least the tokenizer's own.
        eos_token_ids: tokens that end a text.

    Raises:
        RequestError: llguidance cannot read this tokenizer.
    """

    def __init__(self, definition: str, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        definition = _with_special_ends(definition, eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(definition, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except Exception as error:
            raise RequestError(
                f"structured_outputs: llguidance cannot read this model's tokenizer ({error}); leave it out"
            ) from error
        self._eos_token_ids = eos_token_ids
        self._special_tokens = {
            token["content"]: token["id"]
            for token in json.loads(definition)["added_tokens"]
            if token["id"] < vocab_size and self._tokenizer.is_special_token(token["id"])
        }

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile what a request's text must match, first in a sandbox.

        Raises:
            RequestError: it is wrong, too complex, or matches no text.
        """
        source = self._source(wanted)
        _check_in_sandbox(source, wanted.kind)
        compiled = CompiledGrammar(source, self._tokenizer, special_ids=self._special_tokens.values())
        first = compiled.shared_matcher()
        first.compute_bitmask()
        if first.is_error():
            raise _refusal(wanted.kind, first.get_error())
        for left_out in first.get_grammar_warnings():
            _warn_once(summary(left_out))
        return compiled

    def _source(self, wanted: StructuredOutputs) -> str:
        """The grammar in llguidance's own form."""
        try:
            match wanted.kind:
                case "json" | "json_object":
                    flexible, pattern = not wanted.disable_any_whitespace, wanted.whitespace_pattern
                    spaces: JsonCompileOptions = {"whitespace_flexible": flexible, "whitespace_pattern": pattern}
                    return LLMatcher.grammar_from_json_schema(wanted.text, defaults=spaces)
                case "structural_tag":
                    return structural_tags.to_lark(
                        json.loads(wanted.text), special_tokens=self._special_tokens, eos_token_ids=self._eos_token_ids
                    )
                case "grammar":
                    return f"{grammar_from('grammar', wanted.text)}\n{NO_FORCING}\n"
                case kind:
                    return grammar_from(kind, wanted.text)
        except RequestError:
            raise
        except ValueError as error:  # from the reader of GBNF, or of JSON that is nested too deeply
            raise _refusal(wanted.kind, str(error)) from error


class CompiledGrammar:
    """A grammar and the matchers that follow it.

    Shared matchers share what they learn about the grammar's lexer, and with it the limit on that.
    `is_exhausted` says that the limit was met: shared matchers are then of no use any more.

    Args:
        source: the grammar in llguidance's own form.
        tokenizer: of the text.
        special_ids: its special tokens.
    """

    def __init__(self, source: str, tokenizer: LLTokenizer, *, special_ids: Iterable[int]) -> None:
        self.is_exhausted = False
        self._source = source
        self._tokenizer = tokenizer
        self._special_ids = np.fromiter(special_ids, dtype=np.int64)
        self._first = self._compile()

    def shared_matcher(self) -> LLMatcher:
        """Return a matcher at the beginning of a text that shares its lexer; takes microseconds."""
        return self._first.deep_copy()

    def compile_private_matcher(self) -> Future[LLMatcher]:
        """Compile, on another thread, a matcher at the beginning of a text that shares nothing.

        To be called where a shared matcher has met a limit, so no new sequence gets one.
        """
        self.is_exhausted = True
        return _private_compiler.submit(self._compile)

    def spelling(self, matcher: LLMatcher, bits: NDArray[np.uint8]) -> int | None:
        """Return the ordinary token that begins the text where `bits`, the mask, has a special token for its spelling, else None.

        Where only one text can follow, llguidance allows the first token that the tokenizer makes of it. That is a special
        token where the text spells one, which the matcher then refuses; the bytes of one that is meant begin with a marker.
        """
        ids = self._special_ids
        if not (bits[ids >> 3] >> (ids & 7) & 1).any():
            return None
        text = matcher.compute_ff_bytes()
        if not text or text.startswith(SPECIAL_MARKER):
            return None
        return self._tokenizer.greedy_tokenize(text.decode(errors="ignore"))[0]

    def _compile(self) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False, **MATCHER_LIMITS)  # type: ignore[arg-type]
        return LLMatcher(self._tokenizer, self._source, log_level=0, limits=limits)


def _with_special_ends(definition: str, eos_token_ids: frozenset[int]) -> str:
    """Return a tokenizer.json in which all tokens that end a text are special: llguidance spells texts with added ones that are not."""
    described = json.loads(definition)
    ends = [token for token in described["added_tokens"] if token["id"] in eos_token_ids]
    if all(token["special"] for token in ends):
        return definition
    for token in ends:
        token["special"] = True
    return json.dumps(described)


def _check_in_sandbox(source: str, kind: str) -> None:
    """Compile in another process, which is stopped where it takes too much.

    Raises:
        RequestError: the grammar is wrong or too complex.
    """
    try:
        checked = subprocess.run(
            [sys.executable, "-P", str(Path(sandbox.__file__))],
            input=json.dumps({"grammar": source, "limits": MATCHER_LIMITS}),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SANDBOX_TIMEOUT_S,
            check=False,
            start_new_session=True,  # so that Ctrl-C lets it finish, as a server lets all that runs
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(kind, "it takes too long to compile") from error
    if checked.returncode:
        raise _refusal(kind, "it is too large or too deeply nested to be compiled")
    if checked.stdout:
        raise _refusal(kind, checked.stdout)


def _refusal(kind: str, complaint: str) -> RequestError:
    return RequestError(f"{kind}: cannot be compiled ({summary(complaint)}); mend or simplify it")


def _warn_once(left_out: str) -> None:
    """Log what of a schema texts need not match, as it asks for no strictness, the first time that it is left out."""
    if left_out not in _warned and len(_warned) < MAX_WARNINGS:
        _warned.add(left_out)
        logger.warning("a request's schema is followed only in part, as it is not strict: %r", left_out)


def summary(complaint: str) -> str:
    """Return what llguidance says is wrong, in one line, without the excerpts of the grammar around it."""
    found = re.findall(r"^\s*error: (.+)$", complaint, re.MULTILINE)
    message = found[-1] if found else complaint.strip().split("\n")[0]
    if message == "NoExtensionBias":
        return "it matches no text"
    if "limits." in message:  # advice that a user cannot follow
        return "it takes too much work"
    return message if len(message) <= MAX_COMPLAINT else f"{message[:MAX_COMPLAINT]}..."
