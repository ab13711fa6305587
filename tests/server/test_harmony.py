"""Answers in the form of gpt-oss: channels apart on each endpoint, calls and formats that grammars hold to, and what goes back."""

from __future__ import annotations

import json

import pytest

from forerun.models.chat.harmony import ANALYSIS, FINAL, NEXT, PREAMBLE
from tests.contract.drafters import CASES
from tests.server import response_items
from tests.server.served import CHAT, NAME, served
from tests.server.test_reasoning import (
    FORMAT,
    MESSAGE,
    PATH,
    STRUCTURES,
    ask,
    matches,
    message_of,
    streamed,
    without_ids,
)
from tests.server.thinking_models import CHANNEL, START, harmony_target, writing
from tests.server.thinking_models import MESSAGE as MESSAGE_MARK
from tests.server.thinking_models import NEXT as END
from tests.server.tool_models import TOOLS, fits, tool, tool_llm

CALL = "<|channel|>commentary to=functions.wait <|constrain|>json<|message|>{}"
WRITTEN = f"{ANALYSIS}Hm, so.{NEXT}{FINAL}Yes."
CALLED = f"{ANALYSIS}Hm.{NEXT}{PREAMBLE}I wait.{NEXT}{CALL}"


@pytest.fixture(scope="module")
def server():
    with served(tool_llm(harmony_target())) as it:
        yield it


@pytest.fixture(scope="module")
def drafting():
    with served(tool_llm(harmony_target(), CASES["suffix-tree"])) as it:
        yield it


@pytest.fixture(params=["server", "drafting"])
def either(request):
    return request.getfixturevalue(request.param)


def prompt_of(server, messages, **fields):
    tokens = server.post("/tokenize", {"messages": messages} | fields)["tokens"]
    return server.post("/detokenize", {"tokens": tokens})["prompt"]


def test_the_start_says_what_is_read(server):
    assert "openai, tools in the chat template" in server.lines[0]
    assert "on the channel analysis" in server.lines[0]


def test_channels_are_apart(either, monkeypatch):
    with writing(monkeypatch, WRITTEN):
        whole, message = ask(either), streamed(either)[1]
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Hm, so.",
    }
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "Yes.")
    count = len(either.llm.get_tokenizer().encode(f"{ANALYSIS}Hm, so.<|end|>"))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize("next_message", ["<|start|>assistant", ""])
def test_usage_counts_reasoning_that_the_next_message_ends(server, monkeypatch, next_message):
    with writing(monkeypatch, f"{ANALYSIS}Hm, so.{next_message}{FINAL}Yes."):
        answer = ask(server)
    count = len(server.llm.get_tokenizer().encode(f"{ANALYSIS}Hm, so."))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


def test_log_probabilities_of_several_messages_stand_once(server, monkeypatch):
    written = f"{PREAMBLE}So.{NEXT}{FINAL}Yes."
    with writing(monkeypatch, written):
        for response in (
            response_items.create(server, **response_items.LOGPROBS, max_output_tokens=200),
            response_items.joined(response_items.stream(server, **response_items.LOGPROBS, max_output_tokens=200)),
        ):
            (item,) = response["output"]
            told = "".join(entry["token"] for entry in item["content"][0]["logprobs"])
            assert (item["content"][0]["text"], told) == ("So.\n\nYes.", f"{written}<|im_end|>")


def test_a_call_is_read_behind_what_is_said_before_it(either, monkeypatch):
    with writing(monkeypatch, CALLED):
        (choice,) = ask(either, tools=TOOLS)["choices"]
        message = streamed(either, tools=TOOLS)[1]
    assert choice["finish_reason"] == "tool_calls"
    for one in (choice["message"], message):
        assert (one["reasoning_content"], one["content"]) == ("Hm.", "I wait.")
        (call,) = one["tool_calls"]
        assert call["function"] == {"name": "wait", "arguments": "{}"}


def test_text_without_channels_is_content(server, monkeypatch):
    with writing(monkeypatch, "Yes, plainly."):
        assert message_of(server)["content"] == "Yes, plainly."


def test_reasoning_that_is_cut_is_reasoning(server, monkeypatch):
    with writing(monkeypatch, WRITTEN):
        answer = ask(server, max_tokens=14)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning_content": "Hm, ",
    }
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 14}


def test_an_answer_is_continued(server, monkeypatch):
    messages = [*CHAT, {"role": "assistant", "content": "Yes"}]
    with writing(monkeypatch, ", and no."):
        message = message_of(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert message["content"] == ", and no."


@pytest.mark.parametrize("fields", STRUCTURES[:4])
def test_an_answer_matches_on_its_final_channel(either, fields):
    answer = ask(either, **fields, logit_bias={END: 30}, max_tokens=300)
    message = answer["choices"][0]["message"]
    assert matches(fields, message["content"])
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_thoughts_that_would_begin_other_messages_do_not_stand_before_what_must_match(server):
    bias = {"logit_bias": {START: 18, CHANNEL: 18, MESSAGE_MARK: 14, END: 18}, "max_tokens": 120}
    message = message_of(server, response_format=FORMAT, temperature=1.0, seed=467, **bias)
    assert json.loads(message["content"])["ok"] in (True, False)


def test_where_an_answer_is_continued_it_matches_from_there_on(server):
    messages = [*CHAT, {"role": "assistant", "content": '{"ok"'}]
    fields = {
        "structured_outputs": {"regex": ": true}"},
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    answer = ask(server, messages=messages, **fields)
    assert answer["choices"][0]["message"]["content"] == ": true}"
    assert answer["usage"]["completion_tokens"] == len(": true}") + 1, "no header stands before it"


@pytest.mark.parametrize(
    "begun",
    [
        {"add_generation_prompt": False},
        {
            "messages": [*CHAT, {"role": "assistant", "content": "Yes"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ],
    ids=["without the beginning of an answer", "continued"],
)
def test_forced_calls_are_messages_of_their_own_wherever_a_prompt_ends(server, begun):
    for bias in (20, -100):  # the recipient behind the channel, or before it
        fields = {"tools": TOOLS, "tool_choice": "required", "logit_bias": {CHANNEL: bias, END: 20}, "max_tokens": 300}
        (choice,) = ask(server, **fields, **begun)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"]


@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_fit(either, seed):
    fields = {"tools": TOOLS, "tool_choice": "required", "logit_bias": {END: 20}, "max_tokens": 300}
    (choice,) = ask(either, **fields, temperature=1.0, seed=seed)["choices"]
    client = either.client().chat.completions
    given = {"model": NAME, "messages": CHAT, "temperature": 1.0, "seed": seed} | fields
    (same,) = client.create(**given | {"logit_bias": {str(END): 20}}).choices
    (call,) = same.message.tool_calls
    assert fits(call)
    assert (same.finish_reason, same.message.content) == ("tool_calls", None)
    assert call.function.arguments == choice["message"]["tool_calls"][0]["function"]["arguments"]


def test_a_strict_tool_is_called_or_something_is_said(either):
    tools = [tool("pick", {"colour": {"enum": ["red", "blue"]}}, strict=True)]
    fields = {"tools": tools, "max_tokens": 300, "logit_bias": {END: 20}}
    for seed in range(6):
        message = message_of(either, **fields, temperature=1.0, seed=seed)
        for call in message.get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")
        assert "<|channel|>" not in (message["content"] or "")


def test_an_answer_is_a_call_or_what_the_format_asks_for(either):
    found = set()
    for seed in range(8):
        fields = {"tools": TOOLS[1:], "response_format": FORMAT, "logit_bias": {END: 20}, "max_tokens": 300}
        message = message_of(either, **fields, temperature=1.0, seed=seed)
        if "tool_calls" in message:
            found.add("call")
        else:
            assert json.loads(message["content"])["ok"] in (True, False)
            found.add("answer")
    assert found


def test_what_a_grammar_forces_is_drafted(drafting):
    fields = {"tools": TOOLS, "tool_choice": "required", "logit_bias": {END: 20, CHANNEL: 20}, "max_tokens": 300}
    ask(drafting, **fields)
    counts = drafting.llm.stats.speculation.by_drafter["grammar"]
    assert counts.num_accepted_tokens >= len(" to=functions.")


def test_a_grammar_of_the_clients_own_is_refused(server):
    body = {"messages": CHAT, "structured_outputs": {"grammar": 'start: "yes"'}}
    status, _, answer = server.send("POST", PATH, body)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


def test_messages_and_responses_have_the_same_parts(either, monkeypatch):
    with writing(monkeypatch, CALLED):
        tools = [{"name": "wait", "input_schema": {"type": "object"}}]
        blocks = either.post("/v1/messages", MESSAGE | {"tools": tools})["content"]
        fields = {"tools": response_items.FUNCTIONS, "max_output_tokens": 200}
        whole = response_items.create(either, **fields)["output"]
        joined = response_items.joined(response_items.stream(either, **fields))["output"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert [item["type"] for item in whole] == ["reasoning", "message", "function_call"]
    assert [without_ids(item) for item in whole] == [without_ids(item) for item in joined]
    assert {item["status"] for item in whole} == {"completed"}


def test_calls_results_and_reasoning_go_back_to_the_template(server):
    call = {"id": "1", "type": "function", "function": {"name": "wait", "arguments": "{}"}}
    message = {"role": "assistant", "content": "I wait.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    prompt = prompt_of(server, [*CHAT, message, result], tools=TOOLS)
    said = "Hm.\n\nI wait."
    assert (
        f"<|start|>assistant{ANALYSIS}{said}<|end|><|start|>assistant to=functions.wait<|channel|>commentary json"
        in prompt
    )
    assert prompt.endswith("<|start|>tool<|message|>done<|end|><|start|>assistant")


def test_the_effort_reaches_the_template(server):
    assert prompt_of(server, CHAT, reasoning_effort="high").startswith(
        "<|start|>system<|message|>Reasoning: high<|end|>"
    )


def test_the_last_mark_of_an_answer_is_not_text(server, monkeypatch):
    with writing(monkeypatch, f"{FINAL}Yes.<|end|>"):
        assert message_of(server)["content"] == "Yes."
