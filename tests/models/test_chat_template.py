"""Our rendering of chat templates gives what transformers' gives."""

import dataclasses
import enum
import inspect
import re
from datetime import datetime

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from forerun.models.chat_template import ARGUMENTS, ENVIRONMENT, render, variables_of
from tests.tiny_tokenizer import CHAT_TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <the> weather & more",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = """
{%- if tools is not none and tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- tool.function | tojson(separators=(',', ':'), sort_keys=true) }}
    {% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}{{- message.tool_calls | tojson }}{% endif %}
    {{- bos_token + message.role + ': ' }}
    {%- if message.content is string %}{{- message.content | trim }}
    {%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
    {{- eos_token }}
    {% if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}
"""
COUNTING = """{% set seen = namespace(count=0, last='') %}{% for message in messages -%}
  {% generation %}{% set seen.count = seen.count + 1 %}{% set inner = message.role %}{{ message.content }}{% endgeneration %}
  {%- set seen.last = message.role %}{{ inner is defined }}
{% endfor %}{{ seen.count }} {{ seen.last }} {{ dict(a=1, **{'b': 2}) }} {{ dict.fromkeys(['x']) }} {{ strftime_now('%Y') }}
"""
THINKING = """{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }}|{% endfor %}{{ documents }}{{ lists }}"""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "tools": TOOLS, "counting": COUNTING, "thinking": THINKING}


class Kind(enum.StrEnum):
    USER = "user"


@dataclasses.dataclass
class Part:
    text: str


TEXT = st.text(alphabet="a é<>&'{}%\n\t", max_size=8)
CONTENT = st.one_of(
    TEXT, st.none(), st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", Kind.USER]), "content": CONTENT},
    optional={
        "tool_calls": st.sampled_from([None, [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]]),
        "reasoning": TEXT,
        "thinking": TEXT,
        "reasoning_content": st.none() | TEXT,
    },
)


def theirs(template, messages, variables, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE(vocab={"a": 0}, merges=[])), **SPECIAL)
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options, **variables)


def ours(template, messages, variables, **options):
    return render(template, messages, variables=SPECIAL | variables, **options)


def outcome(lay_out, *args, **options):
    """The text, or that it is refused."""
    try:
        return lay_out(*args, **options)
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=60)
@given(
    messages=st.lists(MESSAGE, max_size=4),
    tools=st.sampled_from([None, [], [TOOL, TOOL]]),
    ending=st.sampled_from([{}, {"add_generation_prompt": True}, {"continue_final_message": True}]),
    variables=st.sampled_from([{}, {"enable_thinking": False}, {"bos_token": "!"}, {"documents": [{"title": "t"}]}]),
)
def test_any_conversation_is_laid_out_as_transformers_does(name, messages, tools, ending, variables):
    arguments = TEMPLATES[name], messages, variables
    assert outcome(ours, *arguments, tools=tools, **ending) == outcome(theirs, *arguments, tools=tools, **ending)


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content", "thinking", "name"])
def test_a_message_goes_on_at_the_end_of_any_field(field):
    messages = [{"role": "assistant", "content": "so ", "reasoning": "hm  "}]
    one_name = "{% for m in messages %}{{ m.role }}<{{ m.NAME }}>{{ m.content }}{% endfor %}"
    for template in (
        one_name.replace("NAME", "thinking"),
        one_name.replace("NAME", "reasoning_content"),
        CHAT_TEMPLATE,
    ):
        options = {"continue_final_message": field}
        assert outcome(ours, template, messages, {}, **options) == outcome(theirs, template, messages, {}, **options)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ raise_exception('no') }}",
        "{{ raise_exception.__globals__ }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% set n = namespace() %}{% set n._x = 1 %}{{ n._x }}",
        "{% set n = namespace(self=1, a=2) %}{{ n.self }}{{ n.a }}",
        "{{ messages[0].content.format('x') }}",
        "{{ range(3) | list }}",
        "{{ lipsum.__globals__ }}",
        "{% generation %}unclosed",
        "{% if %}",
        "{{ picture }} {{ number }} {{ part.text }} {{ part.__class__ }}",
        "{{ number.tofile('x') }}",
    ],
)
def test_templates_reach_as_far_as_in_transformers(template):
    messages = [{"role": "user", "content": "hi"}]
    variables = {"picture": object(), "number": np.int64(3), "part": Part("p")}
    assert outcome(ours, template, messages, variables) == outcome(theirs, template, messages, variables)


def test_templates_have_the_filters_and_functions_of_transformers():
    environment = chat_template_utils._compile_jinja_template(CHAT_TEMPLATE).environment
    assert environment.globals.keys() == ENVIRONMENT.globals.keys()
    assert environment.filters.keys() == ENVIRONMENT.filters.keys()
    options = (list(inspect.signature(one.filters["tojson"]).parameters)[1:] for one in (environment, ENVIRONMENT))
    assert len(set(map(tuple, options))) == 1


def test_today_is_the_day_here():
    text = ours("{{ strftime_now('%d %b %Y') }}", [{"role": "user", "content": ""}], {})
    assert re.fullmatch(r"\d\d \w+ \d{4}", text)
    assert text.endswith(str(datetime.now().year))


@pytest.mark.parametrize(
    ("template", "names"),
    [(TOOLS, {"bos_token", "eos_token", "enable_thinking"}), (COUNTING, {"inner"}), ("{% if %}", set())],
)
def test_variables_are_what_a_template_reads_beyond_its_arguments(template, names):
    assert variables_of(template) - ARGUMENTS == names
