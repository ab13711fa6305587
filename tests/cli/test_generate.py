"""`forerun generate`."""

from __future__ import annotations

import io
import json

import pytest

from forerun.cli.app import main
from tests.cli.fakes import FakeLoader, FakeTokenizer


def test_text_goes_to_stdout_alone(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "p"]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("A fine answer.\n", "")


@pytest.mark.parametrize(("options", "hint"), [([], "; --chat asks it as a user does"), (["--chat"], "")])
def test_an_empty_text_is_explained(
    loader: FakeLoader, capsys: pytest.CaptureFixture[str], options: list[str], hint: str
) -> None:
    loader.llm.answer = ""
    assert main(["generate", "m", "p", *options]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("\n", f"m: the text is empty, the model ended it at once{hint}\n")


def test_no_stream_gives_the_same_text(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "m", "p", "--no-stream"])
    assert capsys.readouterr().out == "A fine answer.\n"


def test_json_is_one_line_of_these_keys(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "p", "--json"]) == 0
    output = capsys.readouterr().out
    report = json.loads(output)
    assert output.count("\n") == 1
    assert set(report) == {
        *("model", "prompt", "text", "token_ids", "finish_reason", "stop_reason"),
        *("seconds", "first_token_seconds", "tokens_per_second", "speculative", "speculation"),
    }
    assert report["text"] == "A fine answer."
    assert report["finish_reason"] == "stop"
    assert set(report["speculation"]) == {
        *("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens"),
        *("acceptance_rate", "acceptance_length", "acceptance_per_position", "by_drafter"),
    }


def test_prompt_is_read_from_stdin_without_its_last_line_break(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", "m", "-"]) == 0
    assert loader.llm.prompts == ["two\nlines"]


def test_prompt_may_start_with_a_hyphen_after_two_hyphens(loader: FakeLoader) -> None:
    assert main(["generate", "m", "--", "--not-a-flag"]) == 0
    assert loader.llm.prompts == ["--not-a-flag"]


def test_chat_makes_the_prompt_a_user_message(loader: FakeLoader) -> None:
    main(["generate", "m", "hello", "--chat"])
    assert loader.llm.prompts == [[{"role": "user", "content": "hello"}]]


def test_request_that_failed_while_running_is_an_error(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.llm.finish_reason, loader.llm.stop_reason = "error", "a logits processor raised"
    assert main(["generate", "m", "p", "--no-stream"]) == 2
    assert "a logits processor raised" in capsys.readouterr().err


def test_chat_with_a_model_that_cannot_be_asked_is_refused(
    loader: FakeLoader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTokenizer, "has_chat_template", False)
    assert main(["generate", "m", "hello"]) == 0
    assert main(["generate", "m", "hello", "--chat"]) == 2
    assert capsys.readouterr().err.startswith("error: --chat: m has no chat template, ")
