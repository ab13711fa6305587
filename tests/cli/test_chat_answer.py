"""Answers of models that think, in `forerun chat` and `forerun generate --chat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.cli.app import main
from forerun.models.tokenizer import Tokenizer
from tests.cli.fakes import FakeLLM, FakeLoader
from tests.cli.test_chat import press_ctrl_c_before_step, talk
from tests.server.thinking_models import harmony_target, thinking_target

THOUGHT = "<think>\nHm.\n</think>\n\nYes."
MESSAGES = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
SAID = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.fixture(scope="module", params=["marks", "harmony"])
def thinking(request: pytest.FixtureRequest) -> tuple[Tokenizer, str]:
    """A tokenizer of a model that thinks, and an answer of its form."""
    target, text = (thinking_target(), THOUGHT) if request.param == "marks" else (harmony_target(), MESSAGES)
    return target.tokenizer, text


def llm_of(thinking: tuple[Tokenizer, str], **fields: Any) -> FakeLLM:
    tokenizer, text = thinking
    llm = FakeLLM(answer=fields.pop("answer", text), **fields)
    llm.get_tokenizer = lambda: tokenizer  # type: ignore[method-assign, assignment, return-value]
    return llm


def test_reasoning_goes_to_stderr_and_the_answer_to_stdout(
    thinking: tuple[Tokenizer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    talk(llm_of(thinking), "well?")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("Yes.\n\n", "Hm.\n\n")


def test_reasoning_is_dim_on_a_terminal(
    thinking: tuple[Tokenizer, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    talk(llm_of(thinking), "well?")
    shown = capsys.readouterr().err
    assert shown.replace("\x1b[2m", "").replace("\x1b[22m", "") == "Hm.\n\n"
    assert shown.startswith("\x1b[2m")
    assert shown.endswith("\x1b[22m")


def test_the_conversation_keeps_reasoning_apart(thinking: tuple[Tokenizer, str]) -> None:
    llm = llm_of(thinking)
    conversation = talk(llm, "well?", "and?")
    assert conversation.messages[1] == SAID
    assert llm.prompts[1] == conversation.messages[:3]


def test_marks_are_seen_where_they_are_special_tokens(thinking: tuple[Tokenizer, str]) -> None:
    llm = llm_of(thinking)
    talk(llm, "well?")
    are_special = thinking[1] == MESSAGES
    assert llm.params[0].skip_special_tokens is not are_special


def test_an_answer_that_is_stopped_in_its_reasoning_is_kept(thinking: tuple[Tokenizer, str]) -> None:
    opening = thinking[1][: thinking[1].index("Hm.")]
    llm = llm_of(thinking, answer=f"{opening}Hm, hm, hm, hm.", accepted=len(opening))
    llm.before_step = press_ctrl_c_before_step(1)
    conversation = talk(llm, "well?")
    assert conversation.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "H"}


@pytest.fixture
def generate(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Run `forerun generate m well? --chat`, given a model's tokenizer and its answer; what is printed."""

    def run(thinking: tuple[Tokenizer, str], *options: str) -> SimpleNamespace:
        loader.llm = llm_of(thinking)
        assert main(["generate", "m", "well?", "--chat", *options]) == 0
        return SimpleNamespace(**capsys.readouterr()._asdict())

    return run


@pytest.mark.parametrize("options", [(), ("--no-stream",)])
def test_generate_writes_both_apart(
    generate: Callable[..., SimpleNamespace], thinking: tuple[Tokenizer, str], options: tuple[str, ...]
) -> None:
    output = generate(thinking, *options)
    assert (output.out, output.err) == ("Yes.\n", "Hm.\n\n")


def test_json_has_both(generate: Callable[..., SimpleNamespace], thinking: tuple[Tokenizer, str]) -> None:
    output = generate(thinking, "--json")
    report = json.loads(output.out)
    assert (report["text"], report["reasoning"], output.err) == ("Yes.", "Hm.", "")
