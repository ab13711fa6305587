"""Hidden states over HTTP: an answer names its file, which is complete."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.contract.drafters import CASES
from tests.engines import storage
from tests.server.served import CHAT, PROMPT, chat_llm, generate, served

PATHS = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    with served(chat_llm(CASES["extract"], kv_transfer_config=storage(folder))) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_names_a_file_that_is_complete(saving, path):
    answer = saving.post(path, PATHS[path] | {"temperature": 0, "max_tokens": 5, "ignore_eos": True})
    tensors = load_file(answer["kv_transfer_params"]["hidden_states_path"])
    assert len(tensors["token_ids"]) == len(tensors["hidden_states"]) == answer["usage"]["prompt_tokens"]


def test_a_request_chooses_what_is_saved(saving):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    answer = saving.post("/v1/completions", body | {"kv_transfer_params": {"include_output_tokens": True}})
    written = generate(PROMPT, max_tokens=5, ignore_eos=True)
    expected = written.prompt_token_ids + written.outputs[0].token_ids[:-1]
    assert load_file(answer["kv_transfer_params"]["hidden_states_path"])["token_ids"].tolist() == expected


def test_a_file_that_cannot_be_written_is_no_answer_lost(saving, monkeypatch):
    monkeypatch.setattr("forerun.executor.hidden_states.save_tensors", lambda *_: 1 / 0)
    answer = saving.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert answer["choices"]
    assert answer["kv_transfer_params"] is None


@pytest.mark.parametrize(
    "params", [{"hidden_states_path": "/elsewhere"}, {"include_output_tokens": 1}, {"path": "a"}, {"": None}]
)
def test_mistakes_are_refused(saving, params):
    status, _, answer = saving.send("POST", "/v1/completions", {"prompt": PROMPT, "kv_transfer_params": params})
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


def test_nothing_is_saved_where_there_is_nowhere_to(plain):
    body = {"prompt": PROMPT, "kv_transfer_params": {"include_output_tokens": True}}
    assert plain.send("POST", "/v1/completions", body)[0] == 400
    assert "kv_transfer_params" not in plain.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
