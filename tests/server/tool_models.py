"""A tiny chat model whose template knows tools, in one form or another."""

from __future__ import annotations

import functools
import json
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from forerun.models.tokenizer import load_tokenizer
from forerun.server.tool_use import ToolUse
from tests.engines import native_target, tiny_llm
from tests.tiny_tokenizer import MIN_VOCAB_SIZE, save_tiny_tokenizer

HERMES = (
    "{% if tools %}{{ '<|im_start|>tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL = HERMES.replace("<tool_call>\\n", "[TOOL_CALLS] [").replace("}\\n</tool_call>", "}]")
UNKNOWN = HERMES.replace("tool_call>", "call>")
END = 2
"""<|im_end|>, which spells no text."""


@functools.cache
def tool_target(template=HERMES, marks=("<tool_call>", "</tool_call>"), *, special=False):
    """A tiny random model; `marks` are tokens of its own, 260 the first."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_tokenizer(Path(folder), vocab_size=MIN_VOCAB_SIZE, chat_template=template)
        fast = AutoTokenizer.from_pretrained(path)
        fast.add_tokens(list(marks), special_tokens=special)
        fast.save_pretrained(path)
        tokenizer = load_tokenizer(path)
    return replace(native_target(), tokenizer=tokenizer, eos_token_ids=frozenset({END}))


def tool_llm(target, speculative_config=None):
    """The model with room for tools."""
    return tiny_llm(speculative_config, target=target, max_model_len=1024)


@contextmanager
def saying(monkeypatch, text):
    """While it lasts, models say this text where they may choose whether they call a tool."""
    wanted = {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": text}}}
    with monkeypatch.context() as patch:
        patch.setattr(ToolUse, "structure", lambda self, others: wanted)
        yield


def tool(name, properties, **more):
    """A tool whose arguments are these, all of them needed."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def allowed(*names, mode="auto"):
    """A choice of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def fits(call):
    """Whether a call of the openai client is one of `TOOLS`' and its arguments fit."""
    arguments = json.loads(call.function.arguments)
    match call.function.name:
        case "get_weather":
            return (
                list(arguments) == ["city", "days"] and len(arguments["city"]) <= 5 and arguments["days"] in range(10)
            )
        case "wait":
            return arguments == {}
    return False


TOOLS = [
    tool(
        "get_weather",
        {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    ),
    {"type": "function", "function": {"name": "wait", "description": "Waits."}},
]
WEATHER = TOOLS[0]["function"]["parameters"]
