"""What a text must match is refused before anything runs, each mistake in one line."""

from __future__ import annotations

import functools

import pytest

from forerun import SamplingParams, StructuredOutputs
from forerun.errors import RequestError, UnknownKeyError


def nested(depth):
    return functools.reduce(lambda inner, _: {"not": inner}, range(depth), {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "got none of json"),
        ({"json": {}, "regex": "a"}, "got json and regex of"),
        ({"json": 5}, "json: got 5"),
        ({"json": "{"}, "the schema is not JSON"),
        ({"json": "[1]"}, r"json: got \[1\]"),
        ({"json": {"enum": [{1, 2}]}}, "the schema is not JSON"),
        ({"json": {"const": float("nan")}}, "the schema is not JSON"),
        ({"json": nested(3000)}, "nested too deeply"),
        ({"json": {"pattern": "a" * 9000}}, "a string of 9000 characters"),
        ({"json": {"enum": ["a" * 100] * 1000}}, "must be at most 65536"),
        ({"json_object": False}, "must be True"),
        ({"regex": ""}, "not empty"),
        ({"regex": b"a"}, "must be a text"),
        ({"regex": "a" * 9000}, "must be at most 8192"),
        ({"grammar": " "}, "not empty"),
        ({"choice": []}, "none of them empty"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": "ab"}, "must be a list"),
        ({"regex": "a", "disable_any_whitespace": True}, "go with json"),
        ({"json": {}, "disable_any_whitespace": 1}, "must be True or False"),
        ({"json": {}, "whitespace_pattern": ""}, "must be a regex"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
    ],
)
def test_a_wrong_constraint_is_refused(given, said):
    with pytest.raises(RequestError, match=said) as caught:
        SamplingParams(structured_outputs=given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_unknown_keyword_is_named():
    with pytest.raises(UnknownKeyError, match="did you mean 'regex'"):
        SamplingParams(structured_outputs={"regexp": "a"})


def test_something_else_is_refused():
    with pytest.raises(RequestError, match="must be StructuredOutputs or a dict"):
        SamplingParams(structured_outputs="json")


def test_writing_on_after_the_end_is_refused():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_the_same_constraint_is_equal_however_it_is_written():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    as_dict, as_text = (
        StructuredOutputs(json=schema),
        StructuredOutputs(json='{ "type": "object", "properties": {"b": {}, "a": {}} }'),
    )
    assert as_dict == as_text
    assert hash(as_dict) == hash(as_text)
    assert as_dict != StructuredOutputs(json=schema, disable_any_whitespace=True)
    assert as_dict.text.index('"b"') < as_dict.text.index('"a"'), "keys keep their order"
    assert SamplingParams(structured_outputs={"json": schema}).constraint == as_dict
