"""Reasoning in a text: however it is cut it is read the same, what a prompt has begun counts, and what is talked about does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.models.chat.events import CallBegin, Content, Reasoning, TextReader
from forerun.models.chat.formats import FORMATS, REASONING, reasoning_form
from forerun.models.chat.reasoning import THINK, Place, ReasoningReader
from tests.models.chat.test_call_reader import ADD, CALL, cut

TOOL_CALL = f"<tool_call>{CALL}</tool_call>"
PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<think", ">", "</", "\n", " ", "so", TOOL_CALL, "<tool_call>"]), max_size=8
).map("".join)


def joined(events):
    """Events with neighbours of a kind put together: [("reasoning", text), ("content", text), (name, arguments), ...]."""
    kinds = {Reasoning: "reasoning", Content: "content"}
    reported = []
    for event in events:
        if isinstance(event, CallBegin):
            reported.append((event.name, ""))
            continue
        kind = kinds.get(type(event)) or reported[-1][0]
        if not reported or reported[-1][0] != kind:
            reported.append((kind, ""))
        reported[-1] = (kind, reported[-1][1] + event.text)
    return reported


def reader(place=Place.START, *, has_tools=True):
    then = FORMATS["hermes"].reader(frozenset({"add"}), is_forced=False) if has_tools else TextReader()
    return ReasoningReader(THINK, place, then)


def read(*pieces, place=Place.START, has_tools=True):
    it = reader(place, has_tools=has_tools)
    events = [event for piece in pieces for event in it.push(piece)]
    return joined(events + it.push("", finished=True))


def thought(text):
    return ("reasoning", text)


def said(text):
    return ("content", text)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", [thought("Hm."), said("Yes.")]),
        ("\n<think>Hm. </think>Yes. \n", [thought("Hm."), said("Yes. \n")]),
        ("<think>\n\n</think>\n\nYes.", [said("Yes.")]),
        ("<think>Hm.\n\nSo: \n", [thought("Hm.\n\nSo: \n")]),
        ("<think>Hm.</think", [thought("Hm.</think")]),
        ("<think>\n", []),
        (" <think", [said(" <think")]),
        ("  Yes.", [said("  Yes.")]),
        ("Yes.</think> No.", [said("Yes.</think> No.")]),
        ("Write <think> first.", [said("Write <think> first.")]),
        ("<think>a</think>b<think>c</think>", [thought("a"), said("b<think>c</think>")]),
        (f"<think>{TOOL_CALL}</think>\n{TOOL_CALL}", [thought(TOOL_CALL), ADD]),
        (f"<think>Hm.</think>\n\nI see.\n{TOOL_CALL}", [thought("Hm."), said("I see."), ADD]),
    ],
)
def test_a_text_is_read(text, reported):
    assert read(text) == read(*text) == reported


@pytest.mark.parametrize(
    ("place", "text", "reported"),
    [
        (Place.OPENED, "\n Hm.\n</think>\n\nYes.", [thought("Hm."), said("Yes.")]),
        (Place.OPENED, "Hm.", [thought("Hm.")]),
        (Place.OPENED, "</think>Yes.", [said("Yes.")]),
        (Place.INSIDE, " then.\n</think>\nYes.", [thought(" then."), said("Yes.")]),
        (Place.CLOSED, "\n\nYes.</think>", [said("Yes.</think>")]),
        (Place.CLOSED, "\n<think>Hm.</think>Yes.", [thought("Hm."), said("Yes.")]),
        (Place.BEHIND, " <think> is a mark.", [said(" <think> is a mark.")]),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ended(place, text, reported):
    assert read(text, place=place) == read(*text, place=place) == reported


@given(text=PIECES, places=st.lists(st.integers(0, 200)), place=st.sampled_from(Place), has_tools=st.booleans())
def test_a_text_is_read_the_same_however_it_is_cut(text, places, place, has_tools):
    assert read(*cut(text, places), place=place, has_tools=has_tools) == read(text, place=place, has_tools=has_tools)


@given(text=PIECES, place=st.sampled_from(Place))
def test_nothing_but_marks_and_white_space_is_lost(text, place):
    def visible(some):
        rest = "".join(some.split())
        for mark in ("<think>", "</think>"):
            if mark in rest:  # a mark may come about where another was taken out
                return visible(rest.replace(mark, "", 1))
        return rest

    told = "".join(part for _, part in read(text, place=place, has_tools=False))
    assert visible(told) == visible(text)


def test_reasoning_is_told_as_it_comes():
    it = reader()
    assert it.push("<think>\nHm") == [Reasoning("Hm")]
    assert it.push(", so\n</t") == [Reasoning(", so")]
    assert it.is_reasoning
    assert it.push("hink>") == []
    assert not it.is_reasoning
    assert it.push("Yes") == [Content("Yes")]


GENERATION = "<|user|>hello<|assistant|>"


@pytest.mark.parametrize(
    ("prompt", "last_message", "place"),
    [
        (GENERATION, "hello", Place.START),
        (f"{GENERATION}<think>\n", "hello", Place.OPENED),
        (f"{GENERATION}<think>\n\n</think>\n\n", "hello", Place.CLOSED),
        (f"{GENERATION}</think>", "hello", Place.CLOSED),
        ("<|user|>write <think><|assistant|>", "write <think>", Place.START),
        ("<|user|></think><|assistant|><think>", "</think>", Place.OPENED),
        ("write <think>", "write <think>", Place.START),
        ("<|user|>nk><|assistant|><think>", ">", Place.OPENED),
        ("<|user|>><|assistant|><think>\n", ">", Place.OPENED),
    ],
)
def test_what_the_template_writes_behind_the_last_message_counts(prompt, last_message, place):
    assert THINK.place_after(prompt, last_message=last_message, is_continued=False) == place


@pytest.mark.parametrize(
    ("written", "content", "place"),
    [
        ("", "<think>\nHm", Place.INSIDE),
        ("", "<think>\n", Place.OPENED),
        ("", "<think>Hm.</think>", Place.CLOSED),
        ("", "<think>Hm.</think>\n\nYes", Place.BEHIND),
        ("", "Yes", Place.BEHIND),
        ("", "Write <think>", Place.BEHIND),
        ("", "<think>Hm.</think>Write <think> first", Place.BEHIND),
        ("<think>\n", "Hm", Place.INSIDE),
        ("<think>\n", "Hm.</think>", Place.CLOSED),
        ("<think>\n\n</think>\n\n", "Yes", Place.BEHIND),
        ("<think>\nHm.\n</think>\n\n", "", Place.CLOSED),
        ("", "", Place.START),
    ],
)
def test_a_message_that_is_continued_has_begun(written, content, place):
    prompt = f"<|user|>what is <think>?<|assistant|>{written}{content}"
    assert THINK.place_after(prompt, last_message=content, is_continued=True) == place


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' + message.reasoning_content + '\\n</think>' }}", "qwen3"),
        ("{% if not thinking %}</think>{% endif %}", "qwen3"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("{{ message.content }}", None),
        ("", None),
        (None, None),
        ({"default": "{{ message.content }}", "tool_use": "<think>"}, "qwen3"),
    ],
)
def test_a_template_shows_its_marks(template, name):
    tokenizer = SimpleNamespace(chat_template=template)
    assert reasoning_form(tokenizer) is REASONING.get(name)
    assert reasoning_form(tokenizer, "mistral") is REASONING["mistral"]
    assert reasoning_form(tokenizer, "none") is None
