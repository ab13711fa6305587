"""Compiles grammars with llguidance, none of which may take down or hold up the engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from forerun.core.structured_outputs import StructuredOutputs
from forerun.engine import grammar_trial, structural_tags
from forerun.errors import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = {
    "initial_lexer_fuel": 500_000,  # work on regexes while compiling
    "max_grammar_size": 100_000,  # symbols
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "step_lexer_fuel": 200_000,  # work on regexes for one mask, about 14 ms
    "step_max_items": 50_000,  # work on rules for one mask, about 3 ms
}
TRIAL_TIMEOUT_S = 30.0  # a trial's own limit is CPU time; this is for a machine that gives it none


class Compiler:
    """Compiles for one tokenizer.

    Args:
        definition: the tokenizer, as tokenizer.json.
        vocab_size: width of the masks, at least the tokenizer's own.
        eos_token_ids: what ends a text.

    Raises:
        RequestError: llguidance cannot read this tokenizer.
    """

    def __init__(self, definition: str, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        try:
            self._tokenizer = LLTokenizer(definition, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except Exception as error:
            raise RequestError(
                f"structured_outputs: llguidance cannot read this model's tokenizer ({error}); leave it out"
            ) from error
        self._end_ids = eos_token_ids
        self._marks = {
            token["content"]: token["id"]
            for token in json.loads(definition)["added_tokens"]
            if token["id"] < vocab_size and self._tokenizer.is_special_token(token["id"])
        }

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile what a request's text must match; a trial in a process of its own comes first.

        Raises:
            RequestError: it is wrong, too complex, or matches no text.
        """
        source = self._source(wanted)
        _try(source, wanted.kind)
        compiled = CompiledGrammar(source, self._tokenizer)
        first = compiled.matcher()
        first.compute_bitmask()
        if first.is_error():
            raise _refusal(wanted.kind, first.get_error())
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
                    return structural_tags.to_lark(json.loads(wanted.text), marks=self._marks, end_ids=self._end_ids)
                case kind:
                    return grammar_from(kind, wanted.text)
        except RequestError:
            raise
        except ValueError as error:  # from the reader of GBNF, or of JSON that is nested too deeply
            raise _refusal(wanted.kind, str(error)) from error


class CompiledGrammar:
    """A grammar whose matchers share what they learn about its lexer, and so the limit on that.

    `is_exhausted`: the limit was met, and matchers that share are of no use any more.
    """

    def __init__(self, source: str, tokenizer: LLTokenizer) -> None:
        self.is_exhausted = False
        self._source = source
        self._tokenizer = tokenizer
        self._first = self.matcher_alone()

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of a text, which shares; microseconds."""
        return self._first.deep_copy()

    def matcher_alone(self) -> LLMatcher:
        """A matcher at the beginning of a text, which shares nothing; compiles again."""
        limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]
        return LLMatcher(self._tokenizer, self._source, log_level=0, limits=limits)


def _try(source: str, kind: str) -> None:
    """Compile in another process, which is stopped where it takes too much."""
    try:
        trial = subprocess.run(
            [sys.executable, "-P", str(Path(grammar_trial.__file__))],
            input=json.dumps({"grammar": source, "limits": LIMITS}),
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT_S,
            check=False,
            start_new_session=True,  # a server obeys Ctrl-C when what runs has finished, this as well
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(kind, "it takes too long to compile") from error
    if trial.returncode:
        raise _refusal(kind, "it is too large or too deeply nested to be compiled")
    if trial.stdout:
        raise _refusal(kind, trial.stdout)


def _refusal(kind: str, complaint: str) -> RequestError:
    return RequestError(f"{kind}: cannot be compiled ({brief(complaint)}); mend or simplify it")


def brief(complaint: str) -> str:
    """What llguidance says is wrong, without the excerpts that it shows it in."""
    found = re.findall(r"^\s*error: (.+)$", complaint, re.MULTILINE)
    said = found[-1] if found else complaint.strip().split("\n")[0]
    if said == "NoExtensionBias":
        return "it matches no text"
    if "limits." in said:  # advice that only we could follow
        return "it takes too much work"
    return said if len(said) <= 300 else f"{said[:300]}..."
