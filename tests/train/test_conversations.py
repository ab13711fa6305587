"""Prompts of a file are read or refused by line, and the marks of a chat template are found."""

from __future__ import annotations

import json

import pytest

from forerun.errors import ConfigError
from forerun.models.tokenizer import load_tokenizer
from forerun.train.conversations import ChatMarks, InventedConversations, read_conversations
from tests.tiny_tokenizer import save_tiny_tokenizer


def written(tmp_path, *lines, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_each_form_of_prompt_is_read(tmp_path):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    path = written(tmp_path, {"prompt": "One?"}, "", {"turns": ["Two?", "Three?"]}, {"messages": messages})
    plans = read_conversations(path)
    assert plans.count == 3
    assert [(plan.system, plan.questions) for plan in map(plans.plan, range(3))] == [
        (None, ("One?",)),
        (None, ("Two?", "Three?")),
        ("Be kind.", ("Hi", "Bye")),
    ]


def test_lines_of_a_text_file_are_prompts(tmp_path):
    plans = read_conversations(written(tmp_path, "One?", "", "Two?", name="prompts.txt"))
    assert [plans.plan(number).questions for number in range(2)] == [("One?",), ("Two?",)]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_a_separator_within_a_prompt_ends_no_line(tmp_path, name, separator):
    prompt = f"one{separator}two"
    line = prompt if name.endswith(".txt") else json.dumps({"prompt": prompt}, ensure_ascii=False)
    plans = read_conversations(written(tmp_path, line, line, name=name))
    assert [plans.plan(number).questions for number in range(plans.count)] == [(prompt,), (prompt,)]


@pytest.mark.parametrize(("name", "line"), [("prompts.jsonl", '{"prompt": "One?"}'), ("prompts.txt", "One?")])
def test_a_byte_order_mark_and_other_ends_of_lines_are_no_part_of_a_prompt(tmp_path, name, line):
    path = tmp_path / name
    path.write_bytes(f"\ufeff{line}\r\n{line}\r\n".encode())
    plans = read_conversations(path)
    assert [plans.plan(number).questions for number in range(plans.count)] == [("One?",), ("One?",)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 2 is not JSON"),
        ([], "line 2 must be an object"),
        ({"text": "x"}, "line 2 must be an object"),
        ({"prompt": " "}, "line 2 must be an object"),
        ({"turns": []}, "line 2 must be an object"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2 must be an object"),
        ({"messages": [{"role": "user", "content": " "}]}, "line 2 must be an object"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]},
            "of system, user and assis",
        ),
        ('{"prompt": "half \\ud83d"}', "line 2 has half of a surrogate pair"),
    ],
)
def test_the_first_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        read_conversations(written(tmp_path, {"prompt": "x"}, line, "worse"))


def test_an_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is empty; write one prompt per line"):
        read_conversations(written(tmp_path, "", " "))
    with pytest.raises(ConfigError, match="cannot read"):
        read_conversations(tmp_path / "missing.jsonl")


def test_invented_conversations_are_functions_of_their_numbers():
    plans, again = (InventedConversations(count=None, seed=4) for _ in range(2))
    listed = [plans.plan(number) for number in range(40)]
    assert listed == [again.plan(number) for number in reversed(range(40))][::-1]
    assert {plan.temperature for plan in listed} == {0.0, 0.7, 1.0}
    assert {len(plan.questions) for plan in listed} == {1, 2, 3}


def tokenizer_with(tmp_path, template):
    return load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))


def test_marks_are_what_the_template_writes_around_messages(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
    )
    marks = ChatMarks.read(tokenizer_with(tmp_path, template))
    assert marks.begin == "<|im_start|>user:"
    assert marks.answer == "<|im_end|><|im_start|>assistant:"
    assert marks.following == "<|im_end|><|im_start|>user:"
    with_system = ChatMarks.read(tokenizer_with(tmp_path, template), system="Be kind.")
    assert with_system.begin == "<|im_start|>system:Be kind.<|im_end|><|im_start|>user:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "does not mark the user's turns"),
        ("{{ 'U:' + messages[-1]['content'] + 'A:' }}", "does not write each message once"),
    ],
)
def test_a_template_without_a_user_mark_is_refused(tmp_path, template, message):
    with pytest.raises(ConfigError, match=message):
        ChatMarks.read(tokenizer_with(tmp_path, template))
