"""A tiny chat model that thinks before it answers, and is made to say what a test wants."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

from forerun.server.reading import Reading
from tests.server.tool_models import HERMES, tool_target

GENERATION = "{{ '<|im_start|>assistant\\n' }}"
THINKING = HERMES.replace(
    "{{ '<|im_start|>' + message.role + '\\n' + message.content }}",
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content }}",
).replace(
    GENERATION,
    f"{GENERATION}{{% if enable_thinking is defined and not enable_thinking %}}{{{{ '<think>\\n\\n</think>\\n\\n' }}}}"
    "{% elif opens %}{{ '<think>\\n' }}{% endif %}",
)
"""Thinks or not, as Qwen3 does; with the variable `opens` prompts end within reasoning, as those of DeepSeek-R1 do."""

HARMONY = (
    "{% if reasoning_effort %}{{ '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}{% endif %}"
    "{% if tools %}{{ '<|start|>developer<|message|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('one of both') }}{% endif %}"
    "{% set said = message.content or message.thinking %}{% set call = message.tool_calls[0].function %}"
    "{% if said %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + said + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ (call.arguments | tojson) + '<|call|>' }}"
    "{% else %}"
    "{{ '<|start|>' + message.role + ('<|channel|>final' if message.role == 'assistant' else '') + '<|message|>' }}"
    "{{ message.content + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""Lays conversations out in the form of gpt-oss, and takes what its template takes."""

HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
START, CHANNEL, MESSAGE, NEXT = 260, 261, 262, 263
"""Their tokens."""

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
OPENS_CALL, BEGIN, END = 260, 262, 263
"""The tokens <tool_call>, <think> and </think>."""

OPENS = {"chat_template_kwargs": {"opens": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def thinking_target(marks=MARKS):
    return tool_target(THINKING, marks)


def harmony_target():
    return tool_target(HARMONY, HARMONY_MARKS, special=True)


@contextmanager
def writing(monkeypatch, text):
    """While it lasts, models write this text, whatever they may."""
    wanted = {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": text}}}
    with monkeypatch.context() as patch:
        patch.setattr(Reading, "sampled", lambda self, sampling: replace(sampling, structured_outputs=wanted))
        yield
