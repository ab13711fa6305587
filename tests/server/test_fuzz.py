"""Requests that went wrong somewhere: never a 5xx, never another shape of error, and no harm to the next."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.server import messages_protocol, protocol, request_params, responses, responses_protocol
from tests.server.served import CHAT, PROMPT, generate

BODIES = {
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 2}, protocol.CompletionBody),
    "/v1/chat/completions": ({"messages": CHAT, "max_tokens": 2}, protocol.ChatBody),
    "/v1/responses": ({"input": "hello", "max_output_tokens": 2}, responses_protocol.ResponsesBody),
    "/v1/responses/input_tokens": ({"input": "hello"}, responses_protocol.PromptBody),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 2}, messages_protocol.MessagesBody),
    "/v1/messages/count_tokens": ({"messages": CHAT}, messages_protocol.PromptBody),
    "/tokenize": ({"messages": CHAT}, protocol.TokenizeChatBody),
    "/detokenize": ({"tokens": [70, 71]}, protocol.DetokenizeBody),
}
INNER = {
    "messages": {"role", "content", "name", "tool_calls", "type", "text", "image_url"},
    "stream_options": protocol.StreamOptions.model_fields,
    "forerun": protocol.ForerunFields.model_fields,
    "structured_outputs": {"json", "regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag"},
    "response_format": {"type", "json_schema", "schema", "name", "format", "structures", "triggers"},
    "tools": {"name", "description", "parameters", "strict"},
    "tool_choice": {"type", "function", "allowed_tools", "name", "mode", "tools"},
    "logit_bias": {"70", "-1", "1e3", "99999999999999999999", "\ud800"},
    "system": {"type", "text"},
    "thinking": {"type", "budget_tokens"},
    "output_config": {"effort", "format"},
    "input": {"type", "role", "content", "call_id", "name", "arguments", "output", "summary", "namespace"},
    "text": {"format", "verbosity"},
    "reasoning": {"effort", "summary"},
    "metadata": {"a", ""},
    "chat_template_kwargs": {"messages", "self", "__class__", "chat_template"},
}
IN_LISTS = {
    "messages": lambda inner: [*CHAT, {"role": "user", "content": "a"} | inner],
    "input": lambda inner: [{"role": "user", "content": "a"} | inner],
    "tools": lambda inner: [{"type": "function", "function": {"name": "f"} | inner}],
}
DEEP, DEEP_OBJECT, WIDE, LONG_INT = "@deep@", "@object@", "@wide@", "@long@"
RAW = {
    f'"{DEEP}"': "[" * 700 + "]" * 700,
    f'"{DEEP_OBJECT}"': '{"items":' * 300 + "{}" + "}" * 300,
    f'"{WIDE}"': json.dumps([1] * 70_000),
    f'"{LONG_INT}"': "9" * 4000,
}
"""Strings that stand for what Python's own writer would not write, or would write slowly."""

odd = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 5, 2**31, 2**63, -(2**63), 10**30),
        *(-0.0, 0.5, 1.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
        *("", " ", "\0", "\ud800", "\u202e", "\U0001f600", "a" * 5000, "{{ 7 * 7 }}", "(a*)*b", "<|im_end|>", "text", "json_object"),
        *([], {}, [None], [[]], [[70]], ["a"] * 100, {"": 1}, {"a": {"b": []}}, [{"type": "text"}]),
        *({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}, {"$ref": "#"}, {"type": "json_object"}),
        *(DEEP, DEEP_OBJECT, WIDE, LONG_INT),
    ]
)  # fmt: skip
values = (
    odd
    | st.text(max_size=20)
    | st.integers()
    | st.floats()
    | st.recursive(odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5)
)  # fmt: skip


@st.composite
def broken(draw, path):
    """The JSON text of a valid body with one to three fields lost, added or changed, on the outside or within."""
    valid, model = BODIES[path]
    body = dict(valid)
    names = [*model.model_fields, *request_params.UNSERVED, *request_params.STRUCTURING, "guided_json", "unknown"]
    names += responses.UNSERVED if "responses" in path else ()
    for name in draw(st.lists(st.sampled_from(sorted(set(names))), min_size=1, max_size=3)):
        if name in INNER and draw(st.booleans()):
            keys = st.sampled_from(sorted(INNER[name])) | st.text(max_size=5)
            inner = draw(st.dictionaries(keys, values, max_size=3))
            body[name] = IN_LISTS[name](inner) if name in IN_LISTS else inner
        elif name in body and draw(st.integers(0, 9)) == 0:
            del body[name]
        else:
            body[name] = draw(values)
    text = json.dumps(body)
    for placeholder, raw in RAW.items():
        text = text.replace(placeholder, raw)
    return text


@pytest.mark.parametrize("path", BODIES)
def test_a_broken_request_is_answered_or_told_what_to_change(drafting, path):
    @settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(broken(path))
    def ask(text):
        status, _, answer = drafting.send("POST", path, text)
        assert 200 <= status < 500, answer
        if status != 200:
            check_error(path, answer)
        elif isinstance(answer, str):  # a stream
            *events, rest = answer.split("\n\n")
            assert rest == ""
            if path in ("/v1/completions", "/v1/chat/completions"):
                assert events.pop() == "data: [DONE]"
            for event in events:
                data = json.loads(event.split("data: ", 1)[1])
                if "error" in data:
                    check_error(path, data if "responses" not in path else {"error": data["error"]})

    ask()
    assert drafting.send("GET", "/health")[0] == 200
    answer = drafting.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "temperature": 0})
    assert answer["choices"][0]["text"] == generate(PROMPT, max_tokens=9).outputs[0].text
    assert drafting.model.admission.num_inside == 0


def check_error(path, answer):
    is_messages = "messages" in path
    assert set(answer) == {"error"} | ({"type", "request_id"} if is_messages else set())
    assert set(answer["error"]) == {"message", "type"} | (set() if is_messages else {"param", "code"})
    assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")  # a name that is not served
    assert "\n" not in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500
