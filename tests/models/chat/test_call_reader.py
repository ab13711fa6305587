"""Readers of calls: however a text is cut it is read the same, no text is lost, and none raises."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.models.chat.events import Arguments, CallBegin, Content
from forerun.models.chat.formats import FORMATS, MarkedCalls

MARKED = [name for name, form in FORMATS.items() if isinstance(form, MarkedCalls)]
NAMES = frozenset({"add", "get_weather"})
ARGUMENTS = ({}, {"a": 1, "b": [2.5, None, {"c": "}"}]}, {"text": 'a "b" \\ <tool_call> [TOOL_CALLS] é\n{'})


def joined(events):
    """Events with neighbours of a kind put together: ["text", ("name", "arguments"), ...]."""
    reported = []
    for event in events:
        match event:
            case Content(text) if reported and isinstance(reported[-1], str):
                reported[-1] += text
            case Content(text):
                reported.append(text)
            case CallBegin(name):
                reported.append((name, ""))
            case Arguments(text):
                reported[-1] = (reported[-1][0], reported[-1][1] + text)
    return reported


def read(form, pieces, *, is_forced=False):
    reader = FORMATS[form].reader(NAMES, is_forced=is_forced)
    events = [event for piece in pieces for event in reader.push(piece)]
    return joined(events + reader.push("", finished=True))


def whole(form, text, **how):
    reader = FORMATS[form].reader(NAMES, **({"is_forced": False} | how))
    return joined(reader.push(text, finished=True))


def cut(text, places):
    """The text in pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[low:high] for low, high in zip(ends, ends[1:], strict=False)]


CALL = '{"name": "add", "arguments": {"a": 1}}'
ADD = ("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("form", "text", "reported"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [ADD]),
        ("hermes", f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}", ["Let me see.", ADD, ADD]),
        ("hermes", f"<tool_call>{CALL}</tool_call> Done. ", [ADD, "Done. "]),
        ("hermes", f"<tool_call>{CALL}</tool", [ADD]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [ADD]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        ("hermes", '<tool_call>{ "name" : "add" , "arguments" : { "a" : 1 } }', [("add", '{ "a" : 1 }')]),
        ("hermes", "a < b, <tool and <tool_calls>", ["a < b, <tool and <tool_calls>"]),
        ("hermes", "  \n", ["  \n"]),
        ("hermes", "", []),
        ("hermes", f"<tool_call> I mean <tool_call>{CALL}", ["<tool_call> I mean", ADD]),
        ("llama3_json", ' {"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("llama3_json", f'<|python_tag|>{CALL}; {{"name": "add", "parameters": {{}}}}', [ADD, ("add", "{}")]),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": 1}}', [ADD]),
        ("llama3_json", f"So: {CALL}", [f"So: {CALL}"]),
        ("llama3_json", '{"answer": 42}', ['{"answer": 42}']),
        ("llama3_json", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        ("llama3_json", f"{CALL} and so on", [ADD, "and so on"]),
        ("mistral", f"[TOOL_CALLS] [{CALL}]", [ADD]),
        ("mistral", f"Wait.[TOOL_CALLS][{CALL}, {CALL} ]\n", ["Wait.", ADD, ADD]),
        ("mistral", f"[TOOL_CALLS] [{CALL}, 5]", [ADD, ", 5]"]),
        ("mistral", "[TOOL_CALLS] {}", ["[TOOL_CALLS] {}"]),
        ("mistral", f"[{CALL}]", [f"[{CALL}]"]),
    ],
)
def test_calls_and_text_around_them(form, text, reported):
    assert whole(form, text) == reported
    assert read(form, text) == reported


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "unknown", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "add", "arguments": 5}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": 01}}',
        '{"name": "add", "arguments": {"a": 1,}}',
        '{"name": "add", "arguments": {"a": 1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": "\n"}}',
        '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}",
        '{"name": "add", "arguments": ' + '{"a": ' * 100 + "1" + "}" * 101,
        '{"arguments": {}}',
        '{"name": "add", "other": 1}',
        "{'name': 'add', 'arguments': {}}",
        "{}",
        '{"name": "add", "arguments": {"a": 1}',
        '{"na',
        "",
    ],
)
@pytest.mark.parametrize(("form", "before", "after"), [("hermes", "<tool_call>\n", "\n</tool_call>"), ("mistral", "[TOOL_CALLS] [", "]"), ("llama3_json", "", "")])  # fmt: skip
def test_what_is_no_call_is_content(form, before, after, call):
    text = f"{before}{call}{after}"
    assert "".join(whole(form, text)) == text
    assert "".join(read(form, text)) == text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("is_forced", [False, True])
def test_what_a_form_writes_it_reads(form, is_forced):
    calls = [("add", ARGUMENTS[1]), ("get_weather", ARGUMENTS[2]), ("add", {})]
    reported = read(form, FORMATS[form].written(calls), is_forced=is_forced)
    assert [(name, json.loads(arguments)) for name, arguments in reported] == calls


@pytest.mark.parametrize("form", MARKED)
def test_a_forced_call_is_told_as_it_comes_and_a_free_one_when_it_is_whole(form):
    text = FORMATS[form].written([("add", {"a": 1})])
    steps = {}
    for is_forced in (True, False):
        reader = FORMATS[form].reader(NAMES, is_forced=is_forced)
        steps[is_forced] = [len(reader.push(character)) for character in text]
        assert sum(steps[is_forced]) == (1 + len('{"a": 1}') if is_forced else 2)
        assert not reader.is_calling
    assert steps[True].index(1) < steps[False].index(2)


GAP_BEFORE = r'\s*(?:<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|[,;])?\s*\[?\s*\{"name": "\w+", "\w+": '
GAP_AFTER = r"\}\s*(?:</tool_call>|\]|</?\w*)?\s*"


def texts(form):
    """Texts of calls, whole and cut, of marks and of others."""
    calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.sampled_from(ARGUMENTS)), min_size=1, max_size=3)
    written = calls.map(FORMATS[form].written)
    begun = st.builds(lambda text, end: text[: end % len(text)], written, st.integers(0, 200))
    marks = st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", *'[]{}";,<\\ \n'])
    return st.lists(st.one_of(written, begun, marks, st.text(max_size=5)), max_size=6).map("".join)


@pytest.mark.parametrize("form", MARKED)
@given(data=st.data())
def test_pieces_are_read_as_the_whole_and_nothing_is_lost(form, data):
    text = data.draw(texts(form))
    reported = read(form, cut(text, data.draw(st.lists(st.integers(0, 2000), max_size=30))))
    assert reported == whole(form, text)
    calls = [one for one in reported if not isinstance(one, str)]
    assert all(name in NAMES and isinstance(json.loads(arguments), dict) for name, arguments in calls)
    expected = [re.escape(o) if isinstance(o, str) else GAP_BEFORE + re.escape(o[1]) + GAP_AFTER for o in reported]
    assert re.fullmatch("".join(expected), text)


@pytest.mark.parametrize("form", MARKED)
@given(data=st.data())
def test_forced_calls_that_are_cut_are_told_as_far_as_they_go(form, data):
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.sampled_from(ARGUMENTS)), min_size=1, max_size=3)
    )
    text = FORMATS[form].written(calls)
    text = text[: data.draw(st.integers(0, len(text)))]
    reported = read(form, cut(text, data.draw(st.lists(st.integers(0, 500), max_size=30))), is_forced=True)
    assert reported == whole(form, text, is_forced=True)
    found = [one for one in reported if not isinstance(one, str)]
    for (name, arguments), (wanted_name, wanted) in zip(found, calls, strict=False):
        assert name == wanted_name
        assert json.dumps(wanted, ensure_ascii=False).startswith(arguments)


@pytest.mark.parametrize("begun", ["<tool_call>", "<tool_call>\n", '<tool_call>\n{"na', '<tool_call>{"name": "ad'])
def test_a_forced_call_that_is_cut_before_its_name_is_left_out(begun):
    assert whole("hermes", f"Let me see.\n{begun}", is_forced=True) == ["Let me see."]
    assert whole("hermes", f"Let me see.\n{begun}") == [f"Let me see.\n{begun}"]


def test_a_long_text_that_looks_like_many_calls_is_content():
    text = '<tool_call>{"name": ' * 20_000
    assert "".join(whole("hermes", text)) == text
    nested = '<tool_call>{"name":{' * 20_000
    assert "".join(whole("hermes", nested)) == nested
