"""Grammars are compiled once, and none of them takes the engine down or holds it up."""

from __future__ import annotations

import functools
import importlib.util
import time
from dataclasses import replace

import pytest

from forerun import SamplingParams, StructuredOutputs
from forerun.engine import grammar_compiler
from forerun.engine.grammars import MOST_KEPT, Grammars
from forerun.errors import ConfigError, RequestError
from tests.engines import tiny_llm
from tests.grammars import EOS, begin, encode, grammars, text_target, tokenizer
from tests.native import needs_kernels
from tests.stand_in import VOCAB_SIZE

CHAIN = {f"a{i}": {"prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}], "minItems": 1} for i in range(1000)}
DEEP_SCHEMA = {"$ref": "#/$defs/a0", "$defs": {**CHAIN, "a1000": {"type": "string"}}}
"""Overflows the stack of the thread that compiles it."""

NESTED_SCHEMA = functools.reduce(lambda inner, _: {"items": inner}, range(200), {})


@pytest.mark.parametrize(
    ("wanted", "said"),
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
def test_what_cannot_be_compiled_is_refused_in_one_line(wanted, said):
    with pytest.raises(RequestError) as caught:
        begin(**wanted)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{next(iter(wanted))}: cannot be compiled (")


def test_a_trial_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "TRIAL_TIMEOUT_S", 0.001)
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


def test_a_grammar_is_compiled_once(monkeypatch):
    wanted = StructuredOutputs(regex="compiled once")
    first = grammars().prepare(wanted)
    monkeypatch.setattr(grammar_compiler.subprocess, "run", None)
    assert grammars().prepare(StructuredOutputs(regex="compiled once")) is first


def test_the_grammar_used_longest_ago_is_dropped(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_try", lambda source, kind: None)
    some = Grammars(tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    first, second = (some.prepare(StructuredOutputs(regex=text)) for text in ("x", "y"))
    for number in range(MOST_KEPT - 1):
        some.prepare(StructuredOutputs(regex=f"a{number}"))
        assert some.prepare(StructuredOutputs(regex="x")) is first
    assert some.prepare(StructuredOutputs(regex="y")) is not second


@needs_kernels
def test_the_engine_prepares_ahead(monkeypatch):
    llm = tiny_llm(target=text_target())
    sampling = SamplingParams(structured_outputs={"choice": ["ahead"]}, temperature=0)
    llm.engine.prepare(sampling)
    llm.engine.prepare(SamplingParams())
    monkeypatch.setattr(grammar_compiler.subprocess, "run", None)
    assert llm.generate([[1]], sampling, use_tqdm=False)[0].outputs[0].text == "ahead"


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        tiny_llm().generate([[1]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


@needs_kernels
def test_a_model_without_an_end_is_refused():
    llm = tiny_llm(target=replace(text_target(), eos_token_ids=frozenset()))
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        llm.generate([[1]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


@needs_kernels
def test_without_llguidance_the_extra_is_named(monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr("forerun.engine.grammars.find_spec", lambda name: None if name == "llguidance" else plain(name))
    llm = tiny_llm(target=text_target())
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[structured\]'"):
        llm.generate([[1]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)
    assert llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
