"""Structural tags, free text with constrained parts or a row of such parts, as a grammar in llguidance's Lark notation.

The forms are those that vLLM takes: `{"type": "structural_tag", "format": {...}}`, and the older one with
`structures` and `triggers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forerun.errors import RequestError

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

TEXT_FIELDS = ("value", "pattern", "begin", "end", "separator")
LIST_FIELDS = ("elements", "tags", "triggers")
ESCAPED = r"\\.|/|\n"
SLASHES = {"/": r"\/", "\n": r"\n"}
MAX_TRIGGERS = 64  # each is searched for in the whole text


def to_lark(tag: Mapping[str, Any], *, special_tokens: Mapping[str, int], eos_token_ids: Iterable[int]) -> str:
    """Return the grammar of a structural tag.

    Args:
        tag: the structural tag.
        special_tokens: how each special token is written -> its id. Where a literal holds one, the token is meant.
        eos_token_ids: those that end a text. Free text may hold all other special tokens but those that trigger a tag.

    Raises:
        RequestError: it is no structural tag, or holds a format that is not known.
    """
    try:
        return _Writer(special_tokens, eos_token_ids).grammar(_format(tag))
    except RecursionError as error:
        raise RequestError("structural_tag: is nested too deeply; flatten it") from error


def _format(tag: Mapping[str, Any]) -> Any:
    """The format of a structural tag; the older form is written as the newer one."""
    if "format" in tag:
        return tag["format"]
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(one, Mapping) for one in structures):
        raise _refusal("must have a format, or structures and triggers", tag)
    tags = [{**one, "content": {"type": "json_schema", "json_schema": one.get("schema")}} for one in structures]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Writer:
    """Writes one grammar in llguidance's Lark notation, rule by rule."""

    def __init__(self, special_tokens: Mapping[str, int], eos_token_ids: Iterable[int]) -> None:
        self._special_tokens = special_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._splitter = re.compile(
            "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True)) or "(?!)"
        )
        self._rules: list[str] = []
        self._free_texts: dict[frozenset[int], str] = {}

    def grammar(self, form: Any) -> str:
        start = self._any(form)
        return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules])

    def _any(self, form: Any) -> str:
        """An expression for a format of any type."""
        kind = _checked_type(form)
        match kind:
            case "const_string":
                return self._literal(form["value"])
            case "json_schema":
                return f"%json {_schema(form['json_schema'])}"
            case "regex":
                return _regex(form["pattern"])
            case "any_text":
                return self._text()
            case "sequence" | "or":
                return self._rule((" " if kind == "sequence" else " | ").join(map(self._any, form["elements"])))
            case "tag":
                return self._tag(form, form["begin"])
            case "triggered_tags":
                return self._triggered(form)
            case _:
                return self._separated(form)

    def _tag(self, tag: Any, begin: str) -> str:
        """A tag; `begin` is the part of its beginning that is still to be written."""
        if _checked_type({"type": "tag", **tag} if isinstance(tag, Mapping) else tag) != "tag":
            raise _refusal("must hold tags here", tag)
        content, end = tag.get("content"), tag["end"]
        if _checked_type(content) == "any_text" and end:
            return self._rule(f"{self._literal(begin)} {self._up_to(end)}")
        return self._rule(f"{self._literal(begin)} {self._any(content)} {self._literal(end)}")

    def _triggered(self, form: Any) -> str:
        """Free text in which each trigger is followed by the rest of one of the tags that begin with it."""
        bodies: dict[str, list[str]] = {trigger: [] for trigger in _triggers(form["triggers"])}
        for tag in form["tags"]:
            begin = _begin(tag)
            trigger = next((trigger for trigger in bodies if begin.startswith(trigger)), None)
            if trigger is None:
                raise _refusal("each tag must begin with a trigger", tag)
            bodies[trigger].append(self._tag(tag, begin[len(trigger) :]))
        if not all(bodies.values()):
            raise _refusal("each trigger must begin a tag", form["triggers"])
        begun = [(trigger, self._rule(" | ".join(each))) for trigger, each in bodies.items()]
        hidden = {self._special_tokens[token] for trigger in bodies for token in self._splitter.findall(trigger)}
        first = self._rule(" | ".join(f"{self._literal(trigger)} {body}" for trigger, body in begun))
        later = self._rule(" | ".join(f"{self._up_to(trigger, hidden)} {body}" for trigger, body in begun))
        text = self._text(hidden)
        match bool(form.get("at_least_one")), bool(form.get("stop_after_first")):
            case True, True:
                return first
            case True, False:
                return self._rule(f"{first} {later}* {text}")
            case False, True:
                return self._rule(f"{later} | {text}")
            case _:
                return self._rule(f"{later}* {text}")

    def _separated(self, form: Any) -> str:
        tag = self._rule(" | ".join(self._tag(tag, _begin(tag)) for tag in form["tags"]))
        more = "" if form.get("stop_after_first") else f" ({self._literal(form['separator'])} {tag})*"
        return self._rule(f"{tag}{more}" if form.get("at_least_one") else f"({tag}{more})?")

    def _up_to(self, end: str, hidden: Iterable[int] = ()) -> str:
        """Free text up to and including the first `end`."""
        token = self._splitter.match(end)
        if token:
            return self._rule(f"{self._text({*hidden, self._special_tokens[token.group()]})} {self._literal(end)}")
        ending = self._splitter.split(end)[0]
        return self._rule(
            f"{self._before(hidden)} {self._rule(f'TEXT {_quoted(ending)}', '[lazy]')} {self._literal(end[len(ending) :])}"
        )

    def _text(self, hidden: Iterable[int] = ()) -> str:
        """Free text with any special tokens but those that end texts and those in `hidden`."""
        return self._rule(f"{self._before(hidden)} TEXT")

    def _before(self, hidden: Iterable[int]) -> str:
        """Free text up to a special token that it may hold, any number of times."""
        free = frozenset(self._special_tokens.values()) - self._eos_token_ids - frozenset(hidden)
        if free not in self._free_texts:
            ids = ",".join(map(str, sorted(free)))
            self._free_texts[free] = self._rule(f"(TEXT <[{ids}]>)*" if free else '""')
        return self._free_texts[free]

    def _literal(self, text: str) -> str:
        """A literal text; special tokens in it are written as tokens."""
        parts, at = [], 0
        for token in self._splitter.finditer(text):
            parts += [_quoted(text[at : token.start()]), f"<[{self._special_tokens[token.group()]}]>"]
            at = token.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part) or '""'

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
    return kind


def _begin(tag: Any) -> str:
    begin = tag.get("begin") if isinstance(tag, Mapping) else None
    if not isinstance(begin, str):
        raise _refusal("a tag must have a begin", tag)
    return begin


def _triggers(given: Sequence[Any]) -> Sequence[str]:
    if len(given) > MAX_TRIGGERS or not all(isinstance(trigger, str) and trigger for trigger in given):
        raise _refusal(f"triggers must be at most {MAX_TRIGGERS} texts, none of them empty", given)
    return given


def _schema(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        raise _refusal("a schema must be an object", schema)
    return json.dumps(schema)


def _regex(pattern: str) -> str:
    if not re.fullmatch(r"([^\\]|\\.)+", pattern):
        raise _refusal("a pattern must not be empty, nor end within an escape", pattern)
    return f"/{re.sub(ESCAPED, lambda found: SLASHES.get(found.group(), found.group()), pattern)}/"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _refusal(may_be: str, got: Any) -> RequestError:
    return RequestError(f"structural_tag: got {got!r:.80}; {may_be}")
