"""Harmony's messages in a text: what is on which channel, however it is cut, and what is no message is not lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.models.chat.formats import FORMATS
from forerun.models.chat.harmony import ANALYSIS, FINAL, HARMONY, MARKS, NEXT, PREAMBLE, HarmonyReader
from forerun.models.chat.reasoning import Place
from tests.models.chat.test_call_reader import NAMES, cut
from tests.models.chat.test_reasoning import joined, said, thought

TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ADD = ("add", '{"a": 1}')
CALL = f"{TO_ADD}{ADD[1]}"


def read(*pieces, place=Place.START, is_forced=False):
    reader = HarmonyReader(NAMES, is_forced=is_forced, place=place)
    events = [event for piece in pieces for event in reader.push(piece)]
    return joined(events + reader.push("", finished=True))


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", [thought("Hm."), said("Yes.")]),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.<|return|>", [thought("Hm."), said("Yes.")]),
        (f"{FINAL} Yes.\n", [said(" Yes.\n")]),
        (f"{ANALYSIS}Hm.{NEXT}{CALL}<|call|>", [thought("Hm."), ADD]),
        (f"{PREAMBLE}I add.{NEXT}{CALL}", [said("I add."), ADD]),
        (f"to=functions.add<|channel|>commentary json<|message|>{ADD[1]}", [ADD]),
        (f" to=functions.add<|channel|>commentary <|constrain|>json<|message|>{ADD[1]}", [ADD]),
        (
            f"{ANALYSIS}Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{ADD[1]}",
            [thought("Hm."), ADD],
        ),
        (f"<|channel|>commentary to=functions.add<|constrain|>json<|message|>{ADD[1]}", [ADD]),
        (f"<|channel|>commentary to=functions.add<|message|>{ADD[1]}", [ADD]),
        (f"<|channel|>commentary to=add json<|message|>{ADD[1]}", [ADD]),
        (f"<|channel|>analysis to=functions.add code<|message|>{ADD[1]}", [ADD]),
        (f"{CALL}{NEXT}{CALL}", [ADD, ADD]),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{PREAMBLE}c{NEXT}{FINAL}d", [thought("a\n\nb"), said("c\n\nd")]),
        (f"<|channel|>analysis to=python code<|message|>1 + 1{NEXT}{FINAL}2", [thought("1 + 1"), said("2")]),
    ],
)
def test_messages_are_read_by_their_channels(text, reported):
    assert read(text) == read(*text) == reported


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("Yes.", [said("Yes.")]),
        (" Yes, <b>.", [said(" Yes, <b>.")]),
        ("assistants are", [said("assistants are")]),
        ("to be", [said("to be")]),
        (f"{ANALYSIS}Hm.<|end|>Yes.", [thought("Hm."), said("Yes.")]),
        (f"{ANALYSIS}Hm.<|end|>\n<|start|>assistant{FINAL}Yes.", [thought("Hm."), said("Yes.")]),
        (f"{ANALYSIS}Hm.<|channel|>final<|message|>Yes.", [thought("Hm."), said("Yes.")]),
        (f"{ANALYSIS}Hm.<|start|>assistant<|channel|>final<|message|>Yes.", [thought("Hm."), said("Yes.")]),
        ("<|channel|>final Hello, you.<|end|>", [said("<|channel|>final Hello, you.")]),
        ("<|message|>Yes.", [said("Yes.")]),
        (f"{FINAL}a<|message|>b<|constrain|>c", [said("a<|message|>b<|constrain|>c")]),
        (f"{FINAL}Yes.{NEXT}", [said("Yes.")]),
        (f"{FINAL}Yes.{NEXT}<|channel|>comm", [said("Yes.")]),
        (f"{FINAL}Yes.<|end|><|start|>user<|message|>No?", [said("Yes.\n\nuser<|message|>No?")]),
        (f"{FINAL}<|en", [said("<|en")]),
        (f"{TO_ADD}{{", [said(f"{TO_ADD}{{")]),
        (TO_ADD, [said(TO_ADD)]),
        (f"<|channel|>{' ' * 500}X", [said(f"<|channel|>{' ' * 500}X")]),
        (f"{TO_ADD}[1]", [said(f"{TO_ADD}[1]")]),
        (CALL.replace("add", "subtract"), [said(CALL.replace("add", "subtract"))]),
        ("<|channel|>" + "a" * 600, [said("<|channel|>" + "a" * 600)]),
        (f"{TO_ADD}{'[' * 100_000}", [said(f"{TO_ADD}{'[' * 100_000}")]),
        ("", []),
        ("<|channel|>", []),
    ],
)
def test_what_is_missing_or_no_message_is_content(text, reported):
    assert read(text) == read(*text) == reported


@pytest.mark.parametrize(
    ("place", "text", "reported"),
    [
        (Place.OPENED, f"Hm.{NEXT}{FINAL}Yes.", [thought("Hm."), said("Yes.")]),
        (Place.INSIDE, f", so.{NEXT}{CALL}", [thought(", so."), ADD]),
        (Place.CLOSED, f"<|start|>assistant{FINAL}Yes.", [said("Yes.")]),
        (Place.BEHIND, " and no.<|return|>", [said(" and no.")]),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ended(place, text, reported):
    assert read(text, place=place) == read(*text, place=place) == reported


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("<|start|>user<|message|>hello<|end|><|start|>assistant", Place.START),
        ("<|start|>user<|message|>what is <|channel|>analysis?<|end|><|start|>assistant", Place.START),
        (f"<|start|>user<|message|>hello<|end|><|start|>assistant{ANALYSIS}", Place.OPENED),
        (f"<|start|>user<|message|>hello<|end|><|start|>assistant{ANALYSIS}Hm", Place.INSIDE),
        (f"<|start|>user<|message|>hello<|end|><|start|>assistant{FINAL}Yes", Place.BEHIND),
        ("<|start|>user<|message|>hello<|end|>", Place.CLOSED),
        ("hello", Place.START),
    ],
)
def test_a_prompt_says_where_its_answer_begins(prompt, place):
    assert HARMONY.place_after(prompt, last_message="hello", is_continued=False) == place


def test_a_forced_call_is_told_as_it_comes():
    reader = HarmonyReader(NAMES, is_forced=True)
    assert reader.push(TO_ADD)[0].name == "add"
    assert [event.text for event in reader.push('{"a"')] == ['{"a"']
    assert reader.is_calling
    assert [event.text for event in reader.push(": 1}")] == [": 1}"]
    assert reader.push("", finished=True) == []
    assert not reader.is_calling


@pytest.mark.parametrize("arguments", ["", '{"a": '])
def test_a_forced_call_that_is_cut_goes_on_to_be_one(arguments):
    reader = HarmonyReader(NAMES, is_forced=True)
    events = reader.push(f"{TO_ADD}{arguments}", finished=True)
    assert "".join(event.text for event in events[1:]) == arguments
    assert reader.is_calling


@pytest.mark.parametrize(("text", "is_cut"), [(ANALYSIS, True), (f"{ANALYSIS}Hm.{NEXT}", False)])
def test_reasoning_that_is_cut_goes_on_to_be_it(text, is_cut):
    reader = HarmonyReader(NAMES, is_forced=False)
    reader.push(text, finished=True)
    assert reader.is_reasoning == is_cut


def test_calls_in_another_form_are_read_in_the_content():
    then = FORMATS["hermes"].reader(NAMES, is_forced=False)
    reader = HARMONY.around(then, Place.START)
    text = f'{ANALYSIS}Hm.{NEXT}{FINAL}<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>'
    assert joined(reader.push(text, finished=True)) == [thought("Hm."), ("add", "{}")]


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *MARKS,
                ANALYSIS,
                FINAL,
                PREAMBLE,
                NEXT,
                CALL,
                "assistant",
                "final",
                " to=functions.add",
                "json",
                "<|",
                "\n",
            ]
        ),
        st.text("ab {}<|>", max_size=4),
    ),
    max_size=8,
).map("".join)


@given(text=TEXTS, places=st.lists(st.integers(0, 400)), place=st.sampled_from(Place), is_forced=st.booleans())
def test_a_text_is_read_the_same_however_it_is_cut(text, places, place, is_forced):
    pieces = cut(text, places)
    assert read(*pieces, place=place, is_forced=is_forced) == read(text, place=place, is_forced=is_forced)


@given(text=TEXTS, place=st.sampled_from(Place))
def test_calls_are_of_known_functions_and_their_arguments_objects(text, place):
    for name, told in read(text, place=place):
        assert name in ("reasoning", "content") or (name in NAMES and isinstance(json.loads(told), dict))


# --- what goes back to the template ----------------------------------------------------------------


def call(name, id_):
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": {}}}


def result(id_, content):
    return {"role": "tool", "content": content, "tool_call_id": id_}


def test_a_message_with_reasoning_content_and_a_call_keeps_all_of_it_as_reasoning():
    message = {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": [call("add", "1")]}
    (taken,) = HARMONY.as_its_templates_take([message])
    assert taken == message | {"content": "", "reasoning_content": "Hm.\n\nI add."}


def test_each_of_several_calls_stands_before_its_result():
    calls = [call("add", "1"), call("get_weather", "2")]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        result("2", "sunny"),
        result("1", "3"),
        {"role": "assistant", "content": "Yes."},
    ]
    assert HARMONY.as_its_templates_take(messages) == [
        messages[0],
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls[:1]},
        result("1", "3"),
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        result("2", "sunny"),
        messages[-1],
    ]


def test_results_without_ids_are_those_of_the_calls_in_turn():
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("add", "get_weather")]
    results = [{"role": "tool", "content": content} for content in ("3", "sunny")]
    taken = HARMONY.as_its_templates_take([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert [one.get("tool_calls") or one for one in taken] == [calls[:1], results[0], calls[1:], results[1]]


def test_a_result_stands_once_whatever_its_id():
    calls = [call("add", "1"), call("add", "1")]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    taken = HARMONY.as_its_templates_take([message, result("1", "3"), result("1", "4")])
    assert [one["content"] for one in taken if one["role"] == "tool"] == ["3", "4"]


def test_a_conversation_without_several_calls_stays_as_it_is():
    messages = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call("add", "1")]},
        result("1", "3"),
        result("unknown", "4"),
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    ]
    assert HARMONY.as_its_templates_take(messages) == messages
