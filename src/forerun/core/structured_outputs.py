"""What a request's text must match, in vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from forerun.errors import RequestError, strict_keywords

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_CHARACTERS = {"json": 65536, "regex": 8192, "choice": 65536, "grammar": 16384, "structural_tag": 262144}
MAX_STRING_CHARACTERS = 8192  # of each string in a schema: a pattern is a regex


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the text must match, given as exactly one of six kinds; the text ends where it is complete.

    json: a JSON Schema, as a dict or as text. json_object: True for any JSON object. regex: in the
    syntax of Rust's regex crate, matched by the whole text. choice: one of these texts. grammar:
    context-free, in Lark's or GBNF's notation. structural_tag: free text with parts that match, in
    vLLM's form (see `grammar.structural_tags`), as a dict or as text. For the two JSON kinds
    `disable_any_whitespace` allows no white space between JSON's tokens, and `whitespace_pattern` is a
    regex of the white space that is allowed.

    Raises:
        RequestError: none or several kinds are given, a value is of a wrong type, empty or too large.
        UnknownKeyError: a keyword does not exist.
    """

    json: str | Mapping[str, Any] | None = field(default=None, compare=False)
    regex: str | None = field(default=None, compare=False)
    choice: list[str] | None = field(default=None, compare=False)
    grammar: str | None = field(default=None, compare=False)
    json_object: bool | None = field(default=None, compare=False)
    structural_tag: str | Mapping[str, Any] | None = field(default=None, compare=False)
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    kind: Kind = field(init=False, repr=False)
    text: str = field(init=False, repr=False)  # the kind that is given, as text

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs: got {' and '.join(given) or 'none'} of {', '.join(KINDS)}; must be exactly one; give one"
            )
        self._check_whitespace(given[0])
        object.__setattr__(self, "kind", given[0])
        object.__setattr__(self, "text", self._as_text(given[0]))

    def _as_text(self, kind: str) -> str:
        match kind:
            case "json":
                return _json_text("json", self.json, "schema")
            case "structural_tag":
                return _json_text("structural_tag", self.structural_tag, "structural tag")
            case "json_object":
                if self.json_object is not True:
                    raise RequestError(
                        f"json_object: got {self.json_object!r:.80}; must be True; leave it out otherwise"
                    )
                return '{"type":"object"}'
            case "choice":
                return _choice_text(self.choice)
            case _:
                return _checked_text(kind, getattr(self, kind))

    def _check_whitespace(self, kind: str) -> None:
        pattern = self.whitespace_pattern
        if not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(
                f"disable_any_whitespace: got {self.disable_any_whitespace!r:.80}; must be True or False"
            )
        if pattern is not None and (not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_STRING_CHARACTERS):
            raise RequestError(
                f"whitespace_pattern: got {pattern!r:.80}; must be a regex of at most {MAX_STRING_CHARACTERS} characters, or None"
            )
        if (pattern is not None or self.disable_any_whitespace) and kind not in ("json", "json_object"):
            raise RequestError(
                f"structured_outputs: settings of whitespace go with json or json_object, not {kind}; leave them out"
            )
        if pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured_outputs: disable_any_whitespace and whitespace_pattern exclude each other; give one"
            )


def _checked_text(kind: str, text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{kind}: got {text!r:.80}; must be a text that is not empty")
    if len(text) > MAX_CHARACTERS[kind]:
        raise RequestError(
            f"{kind}: got {len(text)} characters; must be at most {MAX_CHARACTERS[kind]}, so that it compiles in time; shorten it"
        )
    return text


def _json_text(kind: str, given: object, noun: str) -> str:
    """A JSON Schema or a structural tag as compact JSON; keys keep their order, which is that of the answer."""
    try:
        if isinstance(given, str):
            given = json.loads(_checked_text(kind, given))
        if not isinstance(given, Mapping):
            raise RequestError(f"{kind}: got {given!r:.80}; must be a JSON {noun}, a dict or the text of one")
        text = json.dumps(dict(given), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        _check_strings(kind, given)
    except RecursionError as error:
        raise RequestError(f"{kind}: the {noun} is nested too deeply; flatten it") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{kind}: the {noun} is not JSON ({error}); must be a dict or the text of one") from error
    return _checked_text(kind, text)


def _check_strings(kind: str, value: Any) -> None:
    """Raise `RequestError` for a string (a pattern, say) that would take long to compile."""
    if isinstance(value, str) and len(value) > MAX_STRING_CHARACTERS:
        raise RequestError(
            f"{kind}: got a string of {len(value)} characters; must be at most {MAX_STRING_CHARACTERS}; shorten it"
        )
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_strings(kind, name)
            _check_strings(kind, inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_strings(kind, inner)


def _choice_text(choice: object) -> str:
    if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(c, str) and c for c in choice):
        raise RequestError(f"choice: got {choice!r:.80}; must be a list of texts, none of them empty")
    return _checked_text("choice", json.dumps(list(choice)))


def resolve_structured_outputs(given: StructuredOutputs | Mapping[str, Any] | None) -> StructuredOutputs | None:
    """Return a request's constraint, given as such or as a dict of its keywords; None where none is given."""
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if isinstance(given, Mapping):
        return StructuredOutputs(**given)
    raise RequestError(
        f"structured_outputs: got {given!r:.80}; must be StructuredOutputs or a dict such as {{'regex': '[0-9]+'}}"
    )
