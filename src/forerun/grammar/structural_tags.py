"""Structural tags, free text with constrained parts or a row of such parts, as a grammar in llguidance's Lark notation.

The forms are those that vLLM takes: `{"type": "structural_tag", "format": {...}}`, and the older one with
`structures` and `triggers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import RequestError, did_you_mean

FORMATS = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags"),
    "tags_with_separator": ("tags", "separator"),
}
"""Type of a format -> the fields that it needs."""

SWITCH = ("false", "true")
NOTHING = ("[]",)
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "json_schema": {"style": ('"json"',)},
    "any_text": {"excludes": NOTHING},
    "triggered_tags": {"at_least_one": SWITCH, "stop_after_first": SWITCH, "excludes": NOTHING},
    "tags_with_separator": {"at_least_one": SWITCH, "stop_after_first": SWITCH},
}
"""Type of a format -> the fields that it may have besides -> the values of each, as JSON.

Some have one value, which is as if they were left out: xgrammar, whose classes vLLM's users write tags with, puts it there.
"""

TEXT_FIELDS = ("value", "pattern", "begin", "end", "separator")
LIST_FIELDS = ("elements", "tags", "triggers")
EMPTY = '""'
DIGITS = frozenset("0123456789")
NUMBER_OPENINGS = "-0123456789"
JSON_OPENINGS = {
    "object": "{",
    "array": "[",
    "string": '"',
    "number": NUMBER_OPENINGS,
    "integer": NUMBER_OPENINGS,
    "boolean": "tf",
    "null": "n",
}
"""Type in a JSON Schema -> the characters that its texts begin with."""
LIMITS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
NEEDS_TEXT_BEFORE = "the text before it would never end; put a const_string between the two"
NEEDS_NO_DIGIT_AFTER = (
    "its numbers would take in the digit after them and never end; put a const_string between the two"
)
ESCAPED = r"\\.|/|\n"
SLASHES = {"/": r"\/", "\n": r"\n"}
MAX_TRIGGERS = 64  # each is searched for in the whole text


def to_lark(tag: Mapping[str, Any], *, special_tokens: Mapping[str, int], eos_token_ids: Iterable[int]) -> str:
    """Return the grammar of a structural tag.

    Args:
        tag: the structural tag.
        special_tokens: how each special token is written -> its id. Where a literal holds one, the token is meant, and
            free text may hold all but those that trigger a tag.
        eos_token_ids: those that end a text: nothing could follow the token, so literals that hold one spell it.

    Raises:
        RequestError: it is no structural tag, or holds a format that is not known.
    """
    try:
        return _Writer(special_tokens, eos_token_ids).grammar(format_of(tag))
    except RecursionError as error:
        raise RequestError("structural_tag: is nested too deeply; flatten it") from error


def format_of(tag: Mapping[str, Any]) -> Any:
    """The format of a structural tag; the older form is written as the newer one.

    Raises:
        RequestError: it is no structural tag.
    """
    if tag.get("type", "structural_tag") != "structural_tag":
        raise _refusal("the type must be structural_tag; put a format under the key format", tag["type"])
    if "format" in tag:
        _refuse_other_keys("structural_tag", tag, ("type", "format"))
        return tag["format"]
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(one, Mapping) for one in structures):
        raise _refusal("must have a format, or structures and triggers", tag)
    _refuse_other_keys("structural_tag", tag, ("type", "structures", "triggers"))
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": list(map(_tag_of_structure, structures))}


def _tag_of_structure(one: Mapping[str, Any]) -> dict[str, Any]:
    """A tag of the older form, which has a schema in the place of content."""
    _refuse_other_keys("structure", one, ("begin", "schema", "end"))
    tag = {name: value for name, value in one.items() if name != "schema"}
    return tag | {"content": {"type": "json_schema", "json_schema": one.get("schema")}}


@dataclass(frozen=True, slots=True, eq=False)
class _Then:
    """A format that follows another, and what follows it: None where the text ends."""

    form: Any
    then: _Then | None = None


FREE = _Then({"type": "any_text"})


class _Writer:
    """Writes one grammar in llguidance's Lark notation, rule by rule.

    llguidance cuts a text into the longest terminals that it can, and never goes back: a regex would take in what
    is to follow it, and the text could never end. So each format is written together with `end`, the literal text
    after it, in view of what `then` follows.
    """

    def __init__(self, special_tokens: Mapping[str, int], eos_token_ids: Iterable[int]) -> None:
        ends = frozenset(eos_token_ids)
        self._special_tokens = {token: token_id for token, token_id in special_tokens.items() if token_id not in ends}
        tokens = "|".join(re.escape(token) for token in sorted(self._special_tokens, key=len, reverse=True))
        self._splitter = re.compile(f"({tokens or '(?!)'})")
        self._rules: list[str] = []
        self._free_texts: dict[frozenset[int], str] = {}
        self._terminals: dict[str, str] = {}  # of literal texts
        self._pieces_of: dict[str, list[str]] = {}
        self._openings_of: dict[_Then, set[str]] = {}

    def grammar(self, form: Any) -> str:
        start = self._any(form)
        return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules])

    def _any(self, form: Any, end: str = "", then: _Then | None = None) -> str:
        """An expression for a format of any type and the `end` after it."""
        match _checked_type(form):
            case "json_schema":
                if _has_endless_numbers(form["json_schema"]) and self._is_before_digit(end, then):
                    raise _refusal(NEEDS_NO_DIGIT_AFTER, form)
                return f"%json {_schema(form['json_schema'])} {self._literal(end)}"
            case "any_text":
                return self._free(end, then)
            case "or":
                return self._rule(" | ".join(self._any(element, end, then) for element in form["elements"]))
            case "triggered_tags":
                return self._triggered(form, end, then)
            case "tags_with_separator":
                return self._separated(form, end, then)
            case _:
                return self._row([*self._parts(form), *self._parts(_const(end))], then)

    def _is_before_digit(self, end: str, then: _Then | None) -> bool:
        """Whether a digit must follow; False where that is not known."""
        try:
            openings = self._openings(_Then(_const(end), then) if end else then)
        except RequestError:
            return False
        return bool(openings) and openings <= DIGITS

    def _row(self, parts: Sequence[Any], then: _Then | None) -> str:
        """Formats one after the other, none of which is a row itself."""
        written, at = [], 0
        follows = [then]  # from each part on, the last part first
        for part in reversed(parts):
            follows.append(_Then(part, follows[-1]))
        while at < len(parts):
            part, at = parts[at], at + 1
            if part["type"] == "const_string":
                written.append(self._literal(part["value"]))
            elif regular := self._regular(part):
                while at < len(parts) and (more := self._regular(parts[at])):
                    regular, part, at = f"{regular} {more}", parts[at], at + 1
                written.append(self._match(regular, part, follows[len(parts) - at]))
            else:
                end = ""
                while at < len(parts) and parts[at]["type"] == "const_string":
                    end, at = end + parts[at]["value"], at + 1
                written.append(self._any(part, end, follows[len(parts) - at]))
        return self._rule(" ".join(written) or EMPTY)

    def _match(self, regular: str, last: Any, then: _Then | None) -> str:
        """What a regular expression, of which `last` is the last part, matches before what follows."""
        whole = self._terminal(regular)
        if then is None or self._is_special(then.form):  # which no regex takes in
            return whole
        if last["type"] == "const_string":
            return self._rule(whole, "[lazy]")
        openings = self._openings(then)
        if "" in openings or not openings:
            return whole
        one_of_them = "".join(f"\\x{{{ord(opening):x}}}" for opening in sorted(openings))
        return self._terminal(rf"{whole} & ~({whole} /[{one_of_them}](.|\n)*/)")

    def _regular(self, form: Any) -> str | None:
        """A format of literals and regexes alone as one regular expression, or None."""
        match _checked_type(form):
            case "const_string":
                return None if self._splitter.search(form["value"]) else self._literal(form["value"])
            case "regex":
                return _regex(form["pattern"])
            case "sequence" | "tag":
                return self._all_regular(self._parts(form), " ")
            case "or":
                return self._all_regular(form["elements"], " | ")
            case _:
                return None

    def _all_regular(self, forms: Iterable[Any], between: str) -> str | None:
        found = []
        for form in forms:
            regular = self._regular(form)
            if regular is None:
                return None
            found.append(regular)
        return f"({between.join(found) or EMPTY})"

    def _parts(self, form: Any) -> list[Any]:
        """A format as a row of others, none of which is a row; literals are cut at special tokens."""
        match _checked_type(form):
            case "const_string":
                return list(map(_const, self._pieces(form["value"])))
            case "sequence":
                elements = form["elements"]
            case "tag":
                elements = [_const(form["begin"]), form.get("content"), _const(form["end"])]
            case _:
                return [form]
        return [part for element in elements for part in self._parts(element)]

    def _openings(self, then: _Then | None) -> set[str]:
        """The characters of which one must follow, or a special token; "" among them where nothing must.

        Raises:
            RequestError: they are not known.
        """
        if then is None:
            return {""}
        if then not in self._openings_of:
            found = self._first(then.form)
            self._openings_of[then] = found - {""} | self._openings(then.then) if "" in found else found
        return self._openings_of[then]

    def _first(self, form: Any) -> set[str]:
        """The characters that a text of a format begins with; "" among them where it may be empty, or any text."""
        match _checked_type(form):
            case "const_string":
                return set() if self._is_special(form) else {form["value"][:1]}
            case "json_schema":
                return _json_openings(form["json_schema"])
            case "any_text":
                return {""}
            case "regex":
                raise _refusal(NEEDS_TEXT_BEFORE, form)
            case "or":
                return set().union(*map(self._first, form["elements"]))
            case "triggered_tags":
                triggers = _triggers(form["triggers"]) if form.get("at_least_one") else [""]
                return set().union(*(self._first(_const(trigger)) for trigger in triggers))
            case "tags_with_separator":
                found = set().union(*(self._first(_tag(tag)) for tag in form["tags"]))
                return found if form.get("at_least_one") else found | {""}
            case _:
                return self._openings(_chain(self._parts(form), None))

    def _is_special(self, form: Any) -> bool:
        """Whether a format begins with a special token."""
        return form["type"] == "const_string" and self._splitter.match(form["value"]) is not None

    def _triggered(self, form: Any, end: str, then: _Then | None) -> str:
        """Free text in which each trigger is followed by the rest of one of the tags that begin with it."""
        bodies: dict[str, list[str]] = {trigger: [] for trigger in _triggers(form["triggers"])}
        is_needed, is_only = bool(form.get("at_least_one")), bool(form.get("stop_after_first"))
        if not (is_needed and is_only) and any(trigger in end for trigger in bodies):
            raise _refusal("must not contain a trigger of the tags before it", end)
        after = _Then(_const(end)) if end else FREE
        for tag in map(_tag, form["tags"]):
            trigger = next((trigger for trigger in bodies if tag["begin"].startswith(trigger)), None)
            if trigger is None:
                raise _refusal("each tag must begin with a trigger", tag)
            rest = tag | {"begin": tag["begin"].removeprefix(trigger)}
            bodies[trigger].append(self._any(rest, end, then or FREE) if is_only else self._any(rest, then=after))
        if not all(bodies.values()):
            raise _refusal("each trigger must begin a tag", form["triggers"])
        begun = [(trigger, self._rule(" | ".join(each))) for trigger, each in bodies.items()]
        hidden = {self._special_tokens[token] for trigger in bodies for token in self._splitter.findall(trigger)}
        first = self._rule(" | ".join(f"{self._literal(trigger)} {body}" for trigger, body in begun))
        if is_needed and is_only:
            return first
        later = self._rule(" | ".join(f"{self._up_to(trigger, hidden)} {body}" for trigger, body in begun))
        text = self._free(end, then, hidden)
        if is_only:
            return self._rule(f"{later} | {text}")
        return self._rule(f"{first} {later}* {text}" if is_needed else f"{later}* {text}")

    def _separated(self, form: Any, end: str, then: _Then | None) -> str:
        after = _Then(_const(end)) if end else then or FREE
        tag = self._rule(" | ".join(self._any(_tag(tag), then=after) for tag in form["tags"]))
        more = "" if form.get("stop_after_first") else f" ({self._literal(form['separator'])} {tag})*"
        row = f"{tag}{more}" if form.get("at_least_one") else f"({tag}{more})?"
        return self._rule(f"{row} {self._literal(end)}")

    def _free(self, end: str, then: _Then | None, hidden: Iterable[int] = ()) -> str:
        """Free text up to and including the first `end`; where there is none, as much as there is."""
        if end:
            return self._up_to(end, hidden)
        if then is not None and "" not in self._openings(then):
            raise _refusal(NEEDS_TEXT_BEFORE, then.form)
        return self._rule(f"{self._before(hidden)} TEXT")

    def _up_to(self, end: str, hidden: Iterable[int] = ()) -> str:
        """Free text up to and including the first `end`."""
        first = self._pieces(end)[0]
        if first in self._special_tokens:
            before = self._before({*hidden, self._special_tokens[first]})
            return self._rule(f"{before} TEXT {self._literal(end)}")
        ending = self._rule(f"TEXT {self._literal(first)}", "[lazy]")
        return self._rule(f"{self._before(hidden)} {ending} {self._literal(end[len(first) :])}")

    def _before(self, hidden: Iterable[int]) -> str:
        """Free text up to a special token that it may hold, any number of times.

        It may hold all but those in `hidden`.
        """
        free = frozenset(self._special_tokens.values()) - frozenset(hidden)
        if free not in self._free_texts:
            ids = ",".join(map(str, sorted(free)))
            self._free_texts[free] = self._rule(f"(TEXT <[{ids}]>)*" if free else EMPTY)
        return self._free_texts[free]

    def _literal(self, text: str) -> str:
        """A literal text; special tokens in it are written as tokens."""
        ids = self._special_tokens
        written = [f"<[{ids[one]}]>" if one in ids else self._quoted(one) for one in self._pieces(text)]
        return " ".join(written) or EMPTY

    def _pieces(self, text: str) -> list[str]:
        """A text cut at its special tokens."""
        if text not in self._pieces_of:
            self._pieces_of[text] = [piece for piece in self._splitter.split(text) if piece]
        return self._pieces_of[text]

    def _quoted(self, text: str) -> str:
        """A literal text without special tokens, which is written once however often it is used."""
        if text not in self._terminals:
            self._terminals[text] = self._terminal(json.dumps(text))
        return self._terminals[text]

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _rule(self, expression: str, how: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{how}: {expression}")
        return name


def _checked_type(form: Any) -> str:
    """The type of a format; raises unless its fields are of the right types."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if not (isinstance(kind, str) and kind in FORMATS):
        raise _refusal(f"a format's type may be {', '.join(FORMATS)}", form)
    for name in FORMATS[kind]:
        value = form.get(name)
        if name in TEXT_FIELDS and not isinstance(value, str):
            raise _refusal(f"{name} of a {kind} must be a text", value)
        if name in LIST_FIELDS and not (isinstance(value, Sequence) and not isinstance(value, str) and value):
            raise _refusal(f"{name} of a {kind} must be a list that is not empty", value)
    options = OPTIONS.get(kind, {})
    _refuse_other_keys(kind, form, ("type", *FORMATS[kind], *options))
    for name, may_be in options.items():
        if name in form and json.dumps(form[name]) not in may_be:
            raise _refusal(f"{name} of a {kind} must be {' or '.join(may_be)}", form[name])
    return kind


def _refuse_other_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse keys that nobody would read: a text would match something else than was meant."""
    for key in given:
        if key not in known:
            raise _refusal(f"is no key of {where}{did_you_mean(key, known)}", key)


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _chain(forms: Sequence[Any], then: _Then | None) -> _Then | None:
    """Formats one after the other, and what follows them."""
    for form in reversed(forms):
        then = _Then(form, then)
    return then


def _tag(tag: Any) -> dict[str, Any]:
    """A tag where only tags may be, whose type need not be given."""
    if not isinstance(tag, Mapping) or "begin" not in tag:
        raise _refusal("a tag must have a begin", tag)
    form = {"type": "tag", **tag}
    if _checked_type(form) != "tag":
        raise _refusal("must hold tags here", tag)
    return form


def _triggers(given: Sequence[Any]) -> Sequence[str]:
    if len(given) > MAX_TRIGGERS or not all(isinstance(trigger, str) and trigger for trigger in given):
        raise _refusal(f"triggers must be at most {MAX_TRIGGERS} texts, none of them empty", given)
    return given


def _schema(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        raise _refusal("a schema must be an object", schema)
    return json.dumps(schema)


def _json_openings(schema: Any) -> set[str]:
    """The characters that JSON of a schema may begin with; raises where its type does not say."""
    types = schema.get("type") if isinstance(schema, Mapping) else None
    types = types if isinstance(types, list) else [types]
    if not types or not all(isinstance(name, str) and name in JSON_OPENINGS for name in types):
        raise _refusal(NEEDS_TEXT_BEFORE, schema)
    return {opening for name in types for opening in JSON_OPENINGS[name]}


def _has_endless_numbers(schema: Any) -> bool:
    """Whether JSON of a schema may be a number of any length, as far as its type says."""
    if not isinstance(schema, Mapping) or not schema.keys().isdisjoint(("enum", "const")):
        return False
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    is_bounded = not any(schema.keys().isdisjoint(limits) for limits in LIMITS)
    return "number" in types or ("integer" in types and not is_bounded)


def _regex(pattern: str) -> str:
    if not re.fullmatch(r"([^\\]|\\.)+", pattern):
        raise _refusal("a pattern must not be empty, nor end within an escape", pattern)
    return f"/{re.sub(ESCAPED, lambda found: SLASHES.get(found.group(), found.group()), pattern)}/"


def _refusal(may_be: str, got: Any) -> RequestError:
    return RequestError(f"structural_tag: got {got!r:.80}; {may_be}")
