"""Reasoning apart from the answer, on each endpoint that gives conversations: whole and streamed, free and bound by a grammar."""

from __future__ import annotations

import json

import pytest

from forerun.server.chat import ChatCompletion
from forerun.server.messages_protocol import WrittenMessage
from tests.contract.drafters import CASES
from tests.server import response_items
from tests.server.served import CHAT, NAME, served
from tests.server.thinking_models import BEGIN, END, MARKS, OFF, OPENS, OPENS_CALL, THINKING, thinking_target, writing
from tests.server.tool_models import TOOLS, fits, tool, tool_llm, tool_target

PATH = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm, so.\n</think>\n\nYes."
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server():
    with served(tool_llm(thinking_target())) as it:
        yield it


@pytest.fixture(scope="module")
def drafting():
    with served(tool_llm(thinking_target(), CASES["suffix-tree"])) as it:
        yield it


@pytest.fixture(params=["server", "drafting"])
def either(request):
    return request.getfixturevalue(request.param)


def ask(server, **fields):
    """The whole answer, held to what is described."""
    answer = server.post(PATH, {"messages": CHAT, "max_tokens": 200, "temperature": 0} | fields)
    described = ChatCompletion.model_validate(answer)
    for choice, whole in zip(answer["choices"], described.choices, strict=True):
        assert whole.message.model_dump(exclude_unset=True) == choice["message"]
    return answer


def message_of(server, **fields):
    (choice,) = ask(server, **fields)["choices"]
    return choice["message"]


def streamed(server, **fields):
    """The chunks of a stream, and its message put together."""
    chunks = server.stream(PATH, {"messages": CHAT, "max_tokens": 200, "temperature": 0} | fields)
    message = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = put_together(message, choice["delta"])
    return chunks, message


def put_together(message, delta):
    """A message with a delta of it, of one call at most."""
    texts = {name: (message.get(name) or "") + (delta[name] or "") for name in delta if name != "tool_calls"}
    if "tool_calls" not in delta:
        return message | texts
    (more,) = delta["tool_calls"]
    (call,) = message.get("tool_calls") or [{"function": {"name": more["function"].get("name"), "arguments": ""}}]
    call["function"]["arguments"] += more["function"]["arguments"]
    return message | texts | {"tool_calls": [call]}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (THOUGHT, "Hm, so.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", None, "Yes."),
        ("<think>Hm", "Hm", ""),
        ("Yes.</think>", None, "Yes.</think>"),
        (" Use <think>.", None, " Use <think>."),
    ],
)
def test_reasoning_is_apart(either, monkeypatch, text, reasoning, content):
    expected = {"content": content} | ({} if reasoning is None else {"reasoning_content": reasoning})
    with writing(monkeypatch, text):
        assert message_of(either) == {"role": "assistant", "refusal": None} | expected
        assert streamed(either)[1] == {"role": "assistant"} | expected


def test_reasoning_that_is_not_wanted_is_left_out_and_counted(server, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        answer = ask(server, include_reasoning=False)
        message = streamed(server, include_reasoning=False)[1]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert message == {"role": "assistant", "content": "Yes."}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_the_openai_client_reads_it(server, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        (choice,) = server.client().chat.completions.create(model=NAME, messages=CHAT).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm, so.", "Yes.")


def test_reasoning_that_the_prompt_opens_or_closes_has_begun_or_ended(either, monkeypatch):
    with writing(monkeypatch, "Hm.\n</think>\n\nYes."):
        for answer in (message_of(either, **OPENS), streamed(either, **OPENS)[1]):
            assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "Yes.")
        assert message_of(either)["content"] == "Hm.\n</think>\n\nYes."
        assert message_of(either, **OFF)["content"] == "Hm.\n</think>\n\nYes."


def test_marks_in_the_conversation_open_nothing(server, monkeypatch):
    with writing(monkeypatch, "Yes.</think>"):
        for said in ("what is <think>", "what is <think>\n", "<think>"):
            assert message_of(server, messages=[{"role": "user", "content": said}])["content"] == "Yes.</think>"


def test_a_message_is_continued_in_the_middle_of_reasoning(server, monkeypatch):
    begun = {"continue_final_message": True, "add_generation_prompt": False}
    with writing(monkeypatch, ", so.\n</think>Yes."):
        messages = [*CHAT, {"role": "assistant", "content": "<think>\nHm"}]
        message = message_of(server, messages=messages, **begun)
        assert (message["reasoning_content"], message["content"]) == (", so.", "Yes.")
        messages = [*CHAT, {"role": "assistant", "content": "Well"}]
        assert message_of(server, messages=messages, **begun)["content"] == ", so.\n</think>Yes."


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_calls_are_read_behind_reasoning_and_not_in_it(either, monkeypatch, tool_choice):
    fields = {"tools": TOOLS, "tool_choice": tool_choice}
    with writing(monkeypatch, f"<think>\nNot {CALL}?\n</think>\n\n{CALL}"):
        for message in (message_of(either, **fields), streamed(either, **fields)[1]):
            assert message["reasoning_content"] == f"Not {CALL}?"
            assert not message["content"]
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "wait", "arguments": "{}"}


@pytest.fixture(scope="module")
def spelling():
    """A server whose model spells the marks, which are no tokens."""
    with served(tool_llm(thinking_target(MARKS[:2]))) as it:
        yield it


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        (THOUGHT, "<think>\nHm, so.\n</think>"),
        ("<think></think>Yes.", "<think></think>"),
        ("<think>Hm", "<think>Hm<|im_end|>"),
        ("Yes.", ""),
    ],
)
@pytest.mark.parametrize("marks", ["server", "spelling"])
def test_usage_counts_tokens_up_to_and_with_the_closing_mark(monkeypatch, request, text, reasoning, marks):
    it = request.getfixturevalue(marks)
    count = len(it.llm.get_tokenizer().encode(reasoning))
    with writing(monkeypatch, text):
        chunks, _ = streamed(it, stream_options={"include_usage": True})
        for usage in (ask(it)["usage"], chunks[-1]["usage"]):
            assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


def test_usage_counts_the_reasoning_of_all_choices(server, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        answer = ask(server, n=3)
    assert {choice["message"]["reasoning_content"] for choice in answer["choices"]} == {"Hm, so."}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * (len("Hm, so.") + 4)}


def test_logprobs_origins_and_token_ids_are_those_of_all_tokens(drafting, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        fields = {"logprobs": True, "return_token_ids": True, "forerun": {"origins": True}}
        answer = ask(drafting, **fields)
        chunks, _ = streamed(drafting, **fields)
    (choice,) = answer["choices"]
    total = answer["usage"]["completion_tokens"]
    assert total == len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == len(choice["forerun"]["origins"])
    assert "".join(piece["text"] for piece in choice["forerun"]["pieces"]) == THOUGHT
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for one in choices for token in one["token_ids"]] == choice["token_ids"]
    assert "".join(piece["text"] for one in choices for piece in one["forerun"]["pieces"]) == THOUGHT


def test_a_prediction_stands_for_all_of_the_text(drafting, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        answer = ask(drafting, prediction={"type": "content", "content": THOUGHT})
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("Hm, so.") + 4
    assert set(details) == {"reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}


def test_a_stop_string_ends_reasoning(server, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        (choice,) = ask(server, stop=", ")["choices"]
        assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("stop", "Hm")
        (choice,) = ask(server, stop="</think>")["choices"]
        assert choice["message"]["reasoning_content"].rstrip() == "Hm, so."


@pytest.mark.parametrize("begins", [{**OPENS, "logit_bias": {END: -100}}, {"logit_bias": {BEGIN: 100, END: -100}}])
def test_reasoning_that_is_cut_is_reasoning(either, begins):
    answer = ask(either, max_tokens=12, **begins)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


# --- what answers must match -----------------------------------------------------------------------


STRUCTURES = [
    {"response_format": FORMAT},
    {"response_format": {"type": "regex", "regex": "(yes|no)!"}},
    {"structured_outputs": {"choice": ["yes!", "no!"]}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {
        "structured_outputs": {
            "structural_tag": {"structures": [{"begin": "a", "schema": SCHEMA, "end": "b"}], "triggers": ["a"]}
        }
    },
]


def matches(fields, text):
    """Whether a text is what is asked for; free text with tags is any."""
    if "structural_tag" in fields.get("structured_outputs", {}):
        return bool(text)
    return text in ("yes!", "no!") or json.loads(text)["ok"] in (True, False)


@pytest.mark.parametrize("fields", STRUCTURES)
def test_an_answer_matches_behind_reasoning_that_the_prompt_opens(either, fields):
    closing = {"logit_bias": {END: 15}, "max_tokens": 300, "temperature": 1.0}
    assert matches(fields, message_of(either, **fields, **OPENS, **closing, seed=2)["content"])
    (choice,) = ask(either, **fields, **OPENS, max_tokens=20, logit_bias={END: -100})["choices"]
    assert choice["message"]["content"] == "", "before the mark nothing is bound"
    assert choice["message"]["reasoning_content"]


@pytest.mark.parametrize("fields", STRUCTURES[:4])
def test_an_answer_matches_at_once_or_behind_reasoning(either, fields):
    message = message_of(either, **fields, logit_bias={BEGIN: -100})
    assert "reasoning_content" not in message
    assert matches(fields, message["content"])
    fields = fields | {"logit_bias": {BEGIN: 20, END: 21}, "max_tokens": 300}
    answer = ask(either, **fields)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 2
    assert matches(fields, answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("settings", [{"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]"}])
def test_white_space_behind_reasoning_is_what_is_allowed(server, settings):
    (newline,) = server.llm.get_tokenizer().encode("\n")
    schema = {name: value for name, value in SCHEMA.items() if name != "x-guidance"}
    wanted = {"structured_outputs": {"json": schema, **settings}, "logit_bias": {END: 100, newline: 30}}
    message = message_of(server, **wanted, **OPENS)
    assert "\n" not in message["content"]
    assert json.loads(message["content"])["ok"] in (True, False)


@pytest.mark.parametrize("text", ["<|im_end|>", "<think>.", "a\nb [c]\\/é"])
def test_a_choice_behind_reasoning_is_spelled_whatever_tokens_it_names(either, text):
    wanted = {"structured_outputs": {"choice": [text]}, "logit_bias": {END: 100}}
    (choice,) = ask(either, **wanted, **OPENS)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("fields", STRUCTURES[:4])
def test_where_reasoning_is_off_the_answer_matches_from_its_first_token_on(either, fields):
    answer = ask(either, **fields, **OFF, logit_bias={BEGIN: 100, END: 100})
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert matches(fields, answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("prompt", [{}, OPENS, OFF], ids=["free", "open", "off"])
def test_forced_calls_are_made_behind_reasoning(either, prompt):
    bias = {"logit_bias": {END: 30} | ({BEGIN: 29} if prompt == {} else {})}
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300, **prompt}
    answer = ask(either, **fields, **bias)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) is not None
    assert bool(answer["usage"]["completion_tokens_details"]["reasoning_tokens"]) == (prompt != OFF)


@pytest.mark.parametrize("prompt", [{}, OPENS, OFF], ids=["free", "open", "off"])
def test_strict_tools_bind_calls_behind_reasoning_and_not_in_it(either, prompt):
    tools = [tool("pick", {"colour": {"enum": ["red", "blue"]}}, strict=True)]
    bias = {"logit_bias": {END: 16, OPENS_CALL: 15} | ({BEGIN: 14} if prompt == {} else {})}
    found = []
    for seed in range(3):
        sampled = {"temperature": 1.0, "seed": seed, "max_tokens": 300, "parallel_tool_calls": False}
        (choice,) = ask(either, tools=tools, **prompt, **bias, **sampled)["choices"]
        found += choice["message"].get("tool_calls", ())
    assert found
    assert {json.loads(call["function"]["arguments"])["colour"] for call in found} <= {"red", "blue"}


def test_what_a_grammar_forces_behind_reasoning_is_drafted(drafting):
    def count():
        counts = drafting.llm.stats.speculation.by_drafter["grammar"]
        return counts.num_draft_tokens, counts.num_accepted_tokens

    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {END: 30}, **OPENS}
    ask(drafting, **fields)
    before = count()
    ask(drafting, **fields)
    drafted, accepted = (after - earlier for after, earlier in zip(count(), before, strict=True))
    assert drafted >= accepted >= len('{"name": "')


def test_a_grammar_of_the_clients_own_cannot_stand_behind_open_reasoning(server):
    body = {"messages": CHAT, "structured_outputs": {"grammar": 'start: "yes"'}}
    status, _, answer = server.send("POST", PATH, body | OPENS)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert answer["error"]["message"].startswith("structured_outputs.grammar: the answer stands behind reasoning")
    assert message_of(server, **body, **OFF)["content"] == message_of(server, **body)["content"] == "yes"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"structured_outputs": {"structural_tag": {"structures": 5}}}, "structured_outputs.structural_tag: got"),
        ({"structured_outputs": {"structural_tag": {"format": [5]}}}, "structured_outputs.structural_tag: got"),
        ({"structured_outputs": {"json": {"x-guidance": 5}}}, "structured_outputs.json: cannot be compiled"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: cannot be compiled"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format: cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_named_as_the_client_named_it(server, wanted, said):
    status, _, answer = server.send("POST", PATH, {"messages": CHAT, **wanted, **OPENS})
    assert status == 400
    assert answer["error"]["message"].startswith(said)


# --- whose reasoning, and whether ------------------------------------------------------------------


def test_the_start_says_between_which_marks_reasoning_stands(server):
    assert "reasoning               between <think> and </think>" in server.lines[0]


def test_reasoning_is_left_where_it_stands_if_that_is_asked_for(monkeypatch):
    with served(tool_llm(thinking_target()), reasoning_parser="none") as server, writing(monkeypatch, THOUGHT):
        assert "reasoning               left in the content" in server.lines[0]
        assert message_of(server) == {"role": "assistant", "content": THOUGHT, "refusal": None}
        assert "completion_tokens_details" not in ask(server)["usage"]
        assert response_items.create(server, max_output_tokens=200)["output"][0]["content"][0]["text"] == THOUGHT


def test_marks_that_are_special_tokens_are_read(monkeypatch):
    template = THINKING.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    target = tool_target(template, ("[THINK]", "[/THINK]"), special=True)
    with served(tool_llm(target)) as server, writing(monkeypatch, "[THINK]Hm.[/THINK]Yes."):
        for message in (message_of(server), streamed(server)[1]):
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        assert ask(server)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_reasoning_goes_back_to_the_template(server):
    messages = [*CHAT, {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}, *CHAT]
    tokens = server.post("/tokenize", {"messages": messages})["tokens"]
    assert "<think>\nHm.\n</think>\n\nYes." in server.post("/detokenize", {"tokens": tokens})["prompt"]


# --- Messages --------------------------------------------------------------------------------------


MESSAGE = {"model": NAME, "max_tokens": 200, "messages": CHAT, "temperature": 0}


def test_messages_have_blocks_of_thinking(either, monkeypatch):
    with writing(monkeypatch, THOUGHT + CALL):
        answer = either.post(
            "/v1/messages", MESSAGE | {"tools": [{"name": "wait", "input_schema": {"type": "object"}}]}
        )
    WrittenMessage.model_validate(answer)
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm, so.", "signature": ""}
    assert text == {"type": "text", "text": "Yes."}
    assert (call["type"], answer["stop_reason"]) == ("tool_use", "tool_use")


def test_messages_stream_thinking_before_text(either, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        events = either.named_events("/v1/messages", MESSAGE)
    blocks = [event for event in events if event["type"].startswith("content_block")]
    thinking, text = ([event for event in blocks if event["index"] == place] for place in (0, 1))
    assert [event for event in blocks if event["index"] == 0] + [
        event for event in blocks if event["index"] == 1
    ] == blocks
    assert thinking[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    *deltas, signature = [event["delta"] for event in thinking[1:-1]]
    assert "".join(delta["thinking"] for delta in deltas) == "Hm, so."
    assert {delta["type"] for delta in deltas} == {"thinking_delta"}
    assert signature == {"type": "signature_delta", "signature": ""}
    assert text[0]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in text[1:-1]) == "Yes."


def test_a_message_whose_reasoning_is_cut_has_that_alone(server):
    answer = server.post("/v1/messages", MESSAGE | OPENS | {"max_tokens": 5})
    (block,) = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("thinking", "max_tokens")


# --- Responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [THOUGHT, f"<think>Hm.</think>{CALL}", "<think>Hm."])
def test_responses_have_items_of_reasoning(either, monkeypatch, text):
    fields = {"tools": response_items.FUNCTIONS, "max_output_tokens": 200}
    with writing(monkeypatch, text):
        whole = response_items.create(either, **fields)
        joined = response_items.joined(response_items.stream(either, **fields))
    first, *rest = whole["output"]
    assert (first["type"], first["status"], first["summary"]) == ("reasoning", "completed", [])
    assert first["content"] == [{"type": "reasoning_text", "text": "Hm, so." if text == THOUGHT else "Hm."}]
    assert [item["type"] for item in rest] == (["message"] if text == THOUGHT else ["function_call"] * ("call" in text))
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    for one, other in zip(whole["output"], joined["output"], strict=True):
        assert without_ids(one) == without_ids(other)
    assert joined["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]


def without_ids(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_an_item_of_reasoning_that_is_cut_is_incomplete(server):
    answer = response_items.create(server, **OPENS, max_output_tokens=5)
    (item,) = answer["output"]
    assert (item["type"], item["status"], answer["status"]) == ("reasoning", "incomplete", "incomplete")


def test_an_item_of_reasoning_goes_back_to_the_template(server, monkeypatch):
    with writing(monkeypatch, THOUGHT):
        output = response_items.create(server, max_output_tokens=200)["output"]
    given = [response_items.said("user", "hello"), *output, response_items.said("user", "so?")]
    chat = [
        *CHAT,
        {"role": "assistant", "reasoning_content": "Hm, so.", "content": "Yes."},
        {"role": "user", "content": "so?"},
    ]
    counted = server.post("/v1/responses/input_tokens", {"input": given})["input_tokens"]
    assert counted == server.post("/tokenize", {"messages": chat})["count"]


@pytest.mark.parametrize(("text", "content"), [(THOUGHT, "\n\nYes."), ("Yes.", "Yes."), ("<think>Hm.", "")])
def test_log_probabilities_of_a_response_are_those_of_its_text(server, monkeypatch, text, content):
    fields = response_items.LOGPROBS | {"max_output_tokens": 200}
    with writing(monkeypatch, text):
        whole = response_items.create(server, **fields)
        joined = response_items.joined(response_items.stream(server, **fields))
    for response in (whole, joined):
        told = [
            entry
            for item in response["output"]
            if item["type"] == "message"
            for entry in item["content"][0]["logprobs"]
        ]
        assert "".join(entry["token"] for entry in told).removesuffix("<|im_end|>") == content
    assert [without_ids(item) for item in whole["output"]] == [without_ids(item) for item in joined["output"]]


def test_fitting_calls_are_made_after_any_thoughts(server):
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    client = server.client().chat.completions
    extra = {"extra_body": OPENS, "logit_bias": {str(END): 25}}
    (choice,) = client.create(model=NAME, messages=CHAT, temperature=1.0, seed=5, **fields, **extra).choices
    assert fits(choice.message.tool_calls[0])
