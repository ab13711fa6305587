"""Every kind of grammar means what it says, and one that cannot be compiled is refused in a line."""

from __future__ import annotations

import functools
import time

import pytest

from forerun.errors import RequestError
from forerun.grammar import compiler
from tests.grammars import EOS, begin, encode

CHAIN = {f"a{i}": {"prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}], "minItems": 1} for i in range(1000)}
DEEP_SCHEMA = {"$ref": "#/$defs/a0", "$defs": {**CHAIN, "a1000": {"type": "string"}}}
"""Overflows the stack of the thread that compiles it."""

NESTED_SCHEMA = functools.reduce(lambda inner, _: {"items": inner}, range(200), {})


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"type": "number or text"}}, "Invalid type: number or text"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "it matches no text"),
        ({"json": DEEP_SCHEMA}, "too large or too deeply nested"),
        ({"json": NESTED_SCHEMA}, "recursion limit exceeded"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "it matches no text"),
        ({"json": {"type": "integer", "multipleOf": 1000003, "minimum": 3, "maximum": 10**15}}, "fuel exhausted"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"grammar": "hello"}, "Expected ::="),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "recursion"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(wanted, complaint):
    with pytest.raises(RequestError) as caught:
        begin(**wanted)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{next(iter(wanted))}: cannot be compiled (")


def test_what_of_a_lenient_schema_is_left_out_is_logged_once(caplog):
    caplog.set_level("WARNING")
    for limits in ({"maxItems": 3}, {"maxItems": 4}):
        schema = {"type": "array", "minContains": 3, "contains": {}, **limits, "x-guidance": {"lenient": True}}
        assert begin(json=schema).num_possible([], [*encode("[1]"), EOS]) == 4
    (told,) = caplog.messages
    assert "followed only in part" in told
    assert "minContains" in told


def test_what_is_wrong_is_said_whatever_the_systems_encoding(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with pytest.raises(RequestError, match="unclosed group"):
        begin(regex="(\N{LATIN SMALL LETTER E WITH ACUTE}\N{SNOWMAN}")


def test_a_sandbox_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(compiler, "SANDBOX_TIMEOUT_S", 0.001)
    start = time.monotonic()
    with pytest.raises(RequestError, match="it takes too long to compile"):
        begin(regex="never seen before")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, ["12", "-3"], ["x", "1.5"]),
        ({"json": '{"type": "array", "items": {"type": "null"}}'}, ["[null, null]", "[]"], ["[1]"]),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
        ({"json": {"type": "array"}, "whitespace_pattern": "_"}, ["[1,_2]"], ["[1, 2]"]),
        ({"json_object": True}, ['{"a": [1]}'], ["[1]"]),
        ({"regex": r"[a-c]{2}\d"}, ["ab1"], ["a1"]),
        ({"choice": ['say "yes"\n', "né"]}, ['say "yes"\n', "né"], ["no"]),
        ({"grammar": 'root ::= "a" root "b" | "c"'}, ["aacbb"], ["aacb"]),
        ({"grammar": 'start: "a" start "b" | NUM\nNUM: /[0-9]+/'}, ["a17b"], ["ab"]),
    ],
)
def test_every_kind_means_what_it_says(wanted, good, bad):
    for text in good:
        assert begin(**wanted).num_possible([], [*encode(text), EOS]) == len(encode(text)) + 1, text
    for text in bad:
        assert begin(**wanted).num_possible([], [*encode(text), EOS]) <= len(encode(text)), text
