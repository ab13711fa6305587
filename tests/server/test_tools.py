"""Tools through the openai client: forced and free calls, whole and streamed, and what the model is given."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.server.chat import ChatCompletion
from tests.contract.drafters import CASES
from tests.server.served import CHAT, NAME, served
from tests.server.tool_models import HERMES, MISTRAL, TOOLS, UNKNOWN, allowed, fits, saying, tool, tool_llm, tool_target
from tests.tiny_tokenizer import CHAT_TEMPLATE

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
OPENS_CALL = 260
"""The token <tool_call>."""
WAIT = {"type": "function", "function": {"name": "wait"}}


@pytest.fixture(scope="module")
def server():
    with served(tool_llm(tool_target())) as it:
        yield it


@pytest.fixture(scope="module")
def drafting():
    with served(tool_llm(tool_target(), CASES["suffix-tree"])) as it:
        yield it


@pytest.fixture(params=["server", "drafting"])
def either(request):
    return request.getfixturevalue(request.param)


def create(server, messages=CHAT, **fields):
    fields = {"temperature": 0, "max_tokens": 300, "tools": TOOLS} | fields
    return server.client().chat.completions.create(model=NAME, messages=messages, **fields)


def grammar_counts(server):
    """Tokens drafted and accepted so far, of what the grammar leaves no choice about."""
    counts = server.llm.stats.speculation.by_drafter.get("grammar", SpeculationStats())
    return counts.num_draft_tokens, counts.num_accepted_tokens


def called(message):
    """(name, arguments) of each call of a whole message."""
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def streamed(chunks):
    """By index of the choice: content, calls, reason of the end; as a client puts deltas together."""
    contents, calls, reasons = defaultdict(str), defaultdict(dict), {}
    for chunk in chunks:
        for choice in chunk.choices:
            contents[choice.index] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                mine = calls[choice.index]
                if part.index not in mine:
                    assert part.id
                    assert (part.type, part.index) == ("function", len(mine))
                    mine[part.index] = [part.function.name, ""]
                else:
                    assert (part.id, part.type, part.function.name) == (None, None, None)
                mine[part.index][1] += part.function.arguments
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return {i: (contents[i], [tuple(call) for call in calls[i].values()], reasons[i]) for i in reasons}


def test_required_makes_calls_that_fit(either):
    (choice,) = create(either, tool_choice="required", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
    assert call.id.startswith("call_")
    assert fits(call)


def test_a_named_tool_is_called_once_and_ends_with_stop_as_at_openai(either):
    (choice,) = create(either, tool_choice=WAIT).choices
    assert called(choice.message) == [("wait", "{}")]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_all_tools_that_the_model_sees_those_alone_are_called_that_are_allowed(either, mode):
    choice = allowed("wait", mode=mode)
    assert prompt_of(either, tool_choice=choice) == prompt_of(either)
    (answer,) = create(either, tool_choice=choice, logit_bias={OPENS_CALL: 100}).choices
    assert {name for name, _ in called(answer.message)} == {"wait"}
    (answer,) = create(either, tool_choice=choice, logit_bias={OPENS_CALL: -100}, max_tokens=5).choices
    assert bool(answer.message.content) == (mode == "auto")


@pytest.mark.parametrize("seed", range(4))
def test_several_calls_each_fit(either, seed):
    (choice,) = create(either, tool_choice="required", temperature=1.0, seed=seed).choices
    calls = choice.message.tool_calls
    whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
    assert len({call.id for call in calls}) == len(calls)
    assert all(map(fits, whole))


@pytest.mark.parametrize("choice", ["required", WAIT, "auto"])
def test_a_stream_gives_the_whole_answer(either, choice):
    fields = {"tool_choice": choice, "n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 200}
    whole = create(either, **fields)
    reported = streamed(create(either, **fields, stream=True))
    assert reported == {c.index: (c.message.content or "", called(c.message), c.finish_reason) for c in whole.choices}


def test_arguments_are_streamed_as_they_come(server):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "tools": TOOLS[:1]}
    chunks = list(create(server, **fields, stream=True))
    first, *rest = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert (first.function.arguments, first.index) == ("", 0)
    assert len(rest) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.content is None for chunk in chunks)


def test_drafts_change_no_call(server, drafting):
    fields = {"tool_choice": "required", "seed": 4}
    before = grammar_counts(drafting)
    for temperature in (0, 1.0):
        some, other = (create(s, **fields, temperature=temperature).choices[0] for s in (server, drafting))
        assert called(some.message) == called(other.message)
        assert some.finish_reason == other.finish_reason
    drafted, accepted = (after - before for after, before in zip(grammar_counts(drafting), before, strict=True))
    assert drafted == accepted >= len('<tool_call>\n{"name": "')


def test_a_call_cut_by_the_limit_ends_with_length(either):
    fields = {"tool_choice": "required", "tools": TOOLS[:1]}
    (choice,) = create(either, **fields, max_tokens=50).choices
    assert choice.finish_reason == "length"
    assert called(choice.message) == [("get_weather", '{"city": "')]
    (choice,) = create(either, **fields, max_tokens=5).choices
    assert (choice.finish_reason, called(choice.message)) == ("length", [])
    assert choice.message.content is None, "the beginning of a call is no text"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", 1),
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
        ("No tool is needed <b> here.", "No tool is needed <b> here.", 0),
        (CALL.replace("get_weather", "get_wind"), CALL.replace("get_weather", "get_wind"), 0),
        (CALL.replace("3}", "3"), CALL.replace("3}", "3"), 0),
    ],
)
def test_free_calls_are_read_and_what_is_none_is_content(either, monkeypatch, stream, text, content, calls):
    with saying(monkeypatch, text):
        answer = create(either, stream=stream)
        if stream:
            reported = streamed(answer)[0]
        else:
            (choice,) = answer.choices
            reported = (choice.message.content or "", called(choice.message), choice.finish_reason)
    expected = [("get_weather", '{"city": "Rom", "days": 3}')] * calls
    assert reported == (content, expected, "tool_calls" if calls else "stop")


def test_a_message_without_calls_is_an_ordinary_one(server, monkeypatch):
    with saying(monkeypatch, "Hello."):
        message = server.post("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello.", "refusal": None}


def test_strict_tools_bind_calls_in_free_text(either):
    tools = [tool("pick", {"colour": {"enum": ["red", "blue"]}}, strict=True)]
    fields = {"tools": tools, "logit_bias": {OPENS_CALL: 100}, "max_tokens": 300}
    for more in ({"temperature": 1.0, "seed": 3}, {"parallel_tool_calls": False}):
        (choice,) = create(either, **fields, **more).choices
        calls = called(choice.message)
        assert calls if choice.finish_reason == "tool_calls" else calls[:-1]
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
        assert {name for name, _ in whole} == {"pick"}
        assert {json.loads(arguments)["colour"] for _, arguments in whole} <= {"red", "blue"}
    assert len(calls) == 1
    assert choice.finish_reason == "tool_calls"


def test_a_strict_schema_that_cannot_be_obeyed_is_refused_and_another_taken(server):
    for strict, status in ((True, 400), (False, 200)):
        odd = {"name": "f", "strict": strict, "parameters": {"properties": {"a": {"minContains": 3}}}}
        body = {"messages": CHAT, "max_tokens": 5, "tool_choice": "required", "tools": [{"function": odd}]}
        found, _, answer = server.send("POST", "/v1/chat/completions", body)
        assert found == status
        if status == 400:
            assert answer["error"]["param"] == "tools"
            assert "minContains" in answer["error"]["message"]


def test_a_schema_that_takes_too_much_work_while_it_runs_is_the_fault_of_the_tools():
    heavy = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(2000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": heavy}}]
    body = {"messages": CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 300}
    names_alone = HERMES.replace("tool | tojson", "tool.function.name")
    with served(tool_llm(tool_target(names_alone))) as server:
        status, _, whole = server.send("POST", "/v1/chat/completions", body)
        *_, last = server.stream("/v1/chat/completions", body)
    assert status == 400
    for error in (whole["error"], last["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", "tools")
        assert error["message"].startswith("tools: the grammar takes too much work here")


def test_an_answer_is_a_call_or_what_the_format_asks_for(either):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    (choice,) = create(either, **fields, logit_bias={OPENS_CALL: 100}, parallel_tool_calls=False).choices
    assert fits(choice.message.tool_calls[0])
    (choice,) = create(either, **fields, logit_bias={OPENS_CALL: -100}).choices
    assert json.loads(choice.message.content)["ok"] in (True, False)
    assert choice.message.tool_calls is None


def test_a_call_beside_a_format_is_streamed_and_cut_as_a_forced_one(either):
    fields = {
        "response_format": {"type": "json_object"},
        "tools": TOOLS[:1],
        "logit_bias": {OPENS_CALL: 100},
        "max_tokens": 50,
    }
    (choice,) = create(either, **fields).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert called(choice.message) == [("get_weather", '{"city": "')]
    assert streamed(create(either, **fields, stream=True))[0] == ("", called(choice.message), "length")


def test_json_that_only_begins_as_a_call_is_content(monkeypatch):
    text = '{"name": "wait", "days": 3}'
    fields = {"response_format": {"type": "json_object"}, "parallel_tool_calls": False}
    with served(tool_llm(tool_target(UNKNOWN)), tool_call_parser="llama3_json") as server, saying(monkeypatch, text):
        (choice,) = create(server, **fields).choices
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert streamed(create(server, **fields, stream=True))[0] == (text, [], "stop")


@pytest.mark.parametrize(("wanted", "status"), [({"json_object": True}, 200), ({"regex": "a+"}, 400)])
def test_kinds_of_structure_that_are_null_are_as_if_left_out(server, wanted, status):
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 5}
    kinds = dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "structural_tag"))
    found, _, answer = server.send("POST", "/v1/chat/completions", body | {"structured_outputs": kinds | wanted})
    assert (found, answer.get("error", {}).get("param")) == (status, "tools" if status == 400 else None)


def test_results_go_back_to_the_model(server, monkeypatch):
    message = create(server, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = message.tool_calls
    messages = [*CHAT, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    with saying(monkeypatch, "It is sunny."):
        answer = create(server, messages, extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == "It is sunny."
    prompt = server.post("/detokenize", {"tokens": answer.prompt_token_ids})["prompt"]
    arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)
    assert (
        f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {arguments}}}\n</tool_call><|im_end|>' in prompt
    )
    assert prompt.endswith("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")


def prompt_of(server, **fields):
    """The text that a conversation is laid out as."""
    tokens = server.post("/tokenize", {"messages": CHAT, "tools": TOOLS} | fields)["tokens"]
    return server.post("/detokenize", {"tokens": tokens})["prompt"]


def test_the_template_is_given_the_tools_unless_none_may_be_called(server):
    assert '"name": "wait", "description": "Waits.", "parameters": {' in prompt_of(server).replace("\\u0022", '"')
    assert prompt_of(server, tool_choice="none") == prompt_of(server, tools=[])
    (choice,) = create(server, tool_choice="none", max_tokens=5).choices
    assert choice.message.tool_calls is None


def test_a_template_without_tools_gets_them_in_the_system_message():
    with served(tool_llm(tool_target(CHAT_TEMPLATE))) as server:
        assert "hermes, tools in the system message" in server.lines[0]
        assert prompt_of(server).startswith("<|im_start|>system\nYou may call functions.")
        (choice,) = create(server, tool_choice=WAIT, max_tokens=100).choices
        assert called(choice.message) == [("wait", "{}")]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, HERMES], ids=["reads no tools", "reads tools"])
def test_a_conversation_with_tools_is_laid_out_offline_as_it_is_served(template):
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
    strict = {"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Ulm?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    llm = tool_llm(tool_target(template))
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, tools=[TOOLS[0], strict])
    assert "get_weather" in output.prompt
    assert "Waits." in output.prompt
    with served(llm) as server:
        asked = {"messages": messages, "tools": [TOOLS[0], strict]}
        assert server.post("/tokenize", asked)["tokens"] == output.prompt_token_ids


def test_a_special_token_that_begins_calls_is_seen(monkeypatch):
    with served(tool_llm(tool_target(MISTRAL, ("[TOOL_CALLS]",), special=True))) as server:
        assert "mistral, tools in the chat template" in server.lines[0]
        (choice,) = create(server, tool_choice="required", parallel_tool_calls=False).choices
        (call,) = choice.message.tool_calls
        assert fits(call)
        assert len(call.id) == 9
        (choice,) = create(server, logit_bias={OPENS_CALL: 100}, parallel_tool_calls=False).choices
        assert fits(choice.message.tool_calls[0])
        chunks = create(server, logit_bias={OPENS_CALL: 100}, parallel_tool_calls=False, stream=True)
        assert streamed(chunks)[0][1:] == (called(choice.message), "tool_calls")


def test_a_form_that_is_not_known_is_refused_unless_one_is_chosen():
    target = tool_target(UNKNOWN)
    with served(tool_llm(target)) as server:
        status, _, answer = server.send("POST", "/v1/chat/completions", {"messages": CHAT, "tools": TOOLS})
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in answer["error"]["message"]
        assert server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})["choices"]
    with served(tool_llm(target), tool_call_parser="llama3_json") as server:
        (choice,) = create(server, tool_choice="required").choices
        assert fits(choice.message.tool_calls[0])
        (choice,) = create(server, parallel_tool_calls=False).choices
        assert choice.message.content


def test_logprobs_usage_and_origins_stand_beside_calls(drafting):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "logprobs": True}
    fields["extra_body"] = {"forerun": {"origins": True}}
    create(drafting, **fields)  # so that both answers find the prompt in the cache, whichever test is the first
    whole = create(drafting, **fields)
    (choice,) = whole.choices
    assert len(choice.logprobs.content) == whole.usage.completion_tokens == len(choice.forerun["origins"])
    text = "".join(piece["text"] for piece in choice.forerun["pieces"])
    assert choice.message.tool_calls[0].function.arguments in text
    *chunks, last = create(drafting, **fields, stream=True, stream_options={"include_usage": True})
    assert last.usage == whole.usage
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks) == whole.usage.completion_tokens
    assert "".join(piece["text"] for chunk in chunks for piece in chunk.choices[0].forerun["pieces"]) == text


def test_answers_with_calls_and_without_are_as_described(server):
    for choice in ("required", "none"):
        body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "temperature": 0}
        answer = server.post("/v1/chat/completions", body)
        message = ChatCompletion.model_validate(answer).choices[0].message
        assert message.model_dump(exclude_unset=True) == answer["choices"][0]["message"]


def test_a_stop_string_within_a_call_leaves_it_open(server):
    (choice,) = create(server, tool_choice="required", tools=TOOLS[:1], stop='"days"').choices
    assert choice.finish_reason == "stop"
    assert called(choice.message)[-1][1].startswith('{"city": ')


def test_the_clients_stream_helper_puts_calls_together(server):
    fields = {"model": NAME, "messages": CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    with server.client().chat.completions.stream(**fields, parallel_tool_calls=False, max_tokens=300) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert fits(choice.message.tool_calls[0])


def test_the_beginning_of_a_spelled_mark_is_no_content_of_an_answer_that_must_call():
    with served(tool_llm(tool_target(HERMES, ()))) as server:
        (choice,) = create(server, tool_choice="required", max_tokens=3).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", None, None)
