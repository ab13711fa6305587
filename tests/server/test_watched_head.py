"""A server takes in the head of a watched folder while it serves, and no text changes."""

from __future__ import annotations

import json
import time

import pytest

from forerun import LLM
from forerun.errors import ConfigError
from forerun.server import watched_head
from forerun.server.options import ServerOptions
from forerun.server.serve import Server
from tests.engines import tiny_llm
from tests.server.served import served
from tests.train.target_folder import chat_model_folder
from tests.trained_heads import save_trained_head

BODY = {"prompt": "hello hello", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(watched_head, "PERIOD_S", 0.05)


def wait_for(lines, word):
    """The first line with the word, which comes within some seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = [line for line in lines if word in line]
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(lines)


def answer(server):
    """Text and number of drafted tokens of a request."""
    given = server.post("/v1/completions", BODY)
    return given["choices"][0]["text"], given["metrics"]["speculative_decoding"]


def test_a_head_is_used_when_it_comes_and_again_when_it_changes(tmp_path):
    first = save_trained_head(tmp_path / "first", seed=0)
    config = {"method": "eagle3", "model": str(first), "num_speculative_tokens": 3}
    llm = LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config)
    folder = tmp_path / "watched"
    with served(llm, watch_head=folder) as server:
        before = answer(server)
        assert before[1]["num_draft_tokens"] > 0
        save_trained_head(folder, seed=1)
        wait_for(server.lines, "drafts from now on")
        after = answer(server)
        assert after[0] == before[0]
        assert after[1]["num_draft_tokens"] > 0
        server.lines.clear()
        save_trained_head(folder, seed=2)
        wait_for(server.lines, "drafts from now on")
        assert answer(server)[0] == before[0]


def test_a_head_that_cannot_be_used_is_reported_once_and_the_one_before_drafts_on(tmp_path):
    head = save_trained_head(tmp_path / "head", seed=0)
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    llm = LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config)
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with served(llm, watch_head=folder) as server:
        assert "is not used" in wait_for(server.lines, "--watch-head")
        assert answer(server)[1]["num_draft_tokens"] > 0
        time.sleep(0.3)
        assert sum("--watch-head" in line for line in server.lines) == 1


def test_a_head_that_another_failure_kept_out_is_tried_again(tmp_path, monkeypatch):
    config = {
        "method": "eagle3",
        "model": str(save_trained_head(tmp_path / "first", seed=0)),
        "num_speculative_tokens": 3,
    }
    llm = LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config)
    replace_head, failures = llm.replace_head, [RuntimeError("a thread came between")]

    def failing_once(folder):
        if failures:
            raise failures.pop()
        replace_head(folder)

    monkeypatch.setattr(llm, "replace_head", failing_once)
    with served(llm, watch_head=save_trained_head(tmp_path / "watched", seed=1)) as server:
        wait_for(server.lines, "drafts from now on")
    assert not failures


def test_a_drafter_without_a_head_is_refused_at_the_start(tmp_path):
    server = Server(tiny_llm, ServerOptions(port=0, watch_head=tmp_path), report=lambda _line: None)
    with pytest.raises(ConfigError, match="has none that could be replaced"):
        server.run()


def test_auto_without_a_head_is_refused_at_the_start(tmp_path):
    def load():
        config = {"method": "auto", "auto_memory": 0}
        return LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config)

    server = Server(load, ServerOptions(port=0, watch_head=tmp_path), report=lambda _line: None)
    with pytest.raises(ConfigError, match="auto drafts with look-ups alone here"):
        server.run()
