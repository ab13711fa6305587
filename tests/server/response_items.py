"""Requests of /v1/responses, and answers to them: held to what is described, to OpenAI's types, and streams to their own end."""

from __future__ import annotations

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from forerun.server.responses_protocol import WrittenResponse
from tests.server.served import NAME
from tests.server.tool_models import WEATHER

PATH = "/v1/responses"
ASKED = {"model": NAME, "input": "hello", "max_output_tokens": 16, "temperature": 0}
FUNCTIONS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": WEATHER,
    },
    {"type": "function", "name": "wait", "strict": False},
]
SPACE = {"type": "namespace", "name": "sky", "description": "Looks up.", "tools": FUNCTIONS[:1]}
LONG = {"format": {"type": "json_schema", "name": "long", "schema": {"type": "string", "minLength": 4000}}}
"""With which an answer does not end before its limit."""

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
EVENTS = TypeAdapter(ResponseStreamEvent)


def said(role, *texts):
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "type": "message",
        "role": role,
        "content": [{"type": kind, "text": text, "annotations": []} for text in texts],
    }


def call(name="wait", **fields):
    return {"type": "function_call", "id": "fc_1", "call_id": "1", "name": name, "arguments": "{}", **fields}


def given(output="sunny"):
    return {"type": "function_call_output", "call_id": "1", "output": output}


def create(server, **fields):
    """The response, of the shape that is described and that OpenAI's client takes."""
    answer = server.post(PATH, ASKED | fields)
    WrittenResponse.model_validate(answer, strict=True)
    Response.model_validate(answer)
    return answer


def stream(server, **fields):
    """The events of a stream: named by their types, numbered, and what OpenAI's client takes."""
    found = server.named_events(PATH, ASKED | fields)
    for event in found:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def joined(events):
    """The response that ends a stream, whose items are what the events before it tell, each in its turn."""
    created, in_progress, *inner, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert last["type"] == f"response.{last['response']['status']}"
    assert {event["output_index"] for event in inner} == set(range(len(last["response"]["output"])))
    for place, item in enumerate(last["response"]["output"]):
        told = [event for event in inner if event["output_index"] == place]
        assert {event["item_id"] for event in told if "item_id" in event} <= {item["id"]}
        check_events(told, item)
    return last["response"]


def check_events(told, item):
    """Hold the events of one item to the item."""
    added, *begun, done, item_done = told
    kinds = [event["type"].removeprefix("response.") for event in told]
    pieces = [event["delta"] for event in told if event["type"].endswith(".delta")]
    logprobs = [entry for event in told if event["type"].endswith(".delta") for entry in event.get("logprobs", ())]
    assert added["item"] == item | {"status": "in_progress"} | (
        {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    )
    assert item_done["item"] == item
    if item["type"] == "message":
        (part,) = item["content"]
        assert kinds == [
            *("output_item.added", "content_part.added", *["output_text.delta"] * len(pieces)),
            *("output_text.done", "content_part.done", "output_item.done"),
        ]
        assert begun[0]["part"] == part | {"text": "", "logprobs": []}
        assert (begun[-1]["text"], begun[-1]["logprobs"], done["part"]) == (part["text"], part["logprobs"], part)
        assert ("".join(pieces), logprobs) == (part["text"], part["logprobs"])
    elif item["type"] == "reasoning":
        (part,) = item["content"]
        assert kinds == [
            *("output_item.added", "content_part.added", *["reasoning_text.delta"] * len(pieces)),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
        ]
        assert begun[0]["part"] == part | {"text": ""}
        assert (begun[-1]["text"], done["part"], "".join(pieces)) == (part["text"], part, part["text"])
    else:
        assert kinds == [
            *("output_item.added", *["function_call_arguments.delta"] * len(pieces)),
            *("function_call_arguments.done", "output_item.done"),
        ]
        assert "".join(pieces) == done["arguments"] == item["arguments"]
