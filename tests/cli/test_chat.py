"""`forerun chat`, with lines from a list."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

import pytest

from forerun.cli.app import main
from forerun.cli.chat import Conversation
from forerun.core.draft import Draft
from forerun.core.sampling_params import SamplingParams
from forerun.errors import DeviceLostError
from tests.cli.fakes import FakeLLM, FakeLoader, FakeTokenizer

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)


def typed(lines: Iterable[str | type[BaseException]]) -> Callable[[], str]:
    """What a user types, line by line, then the end of input; an exception stands for a key."""
    script = iter(lines)

    def read_line() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def talk(llm: FakeLLM, *lines: str | type[BaseException], system: str | None = None) -> Conversation:
    conversation = Conversation(llm, PARAMS, system=system)  # type: ignore[arg-type]
    conversation.run(typed(lines))
    return conversation


def press_ctrl_c_before_step(number: int) -> Callable[[], None]:
    steps = iter(range(1, 1000))

    def before_step() -> None:
        if next(steps) == number:
            signal.raise_signal(signal.SIGINT)

    return before_step


def test_answers_are_printed_and_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    conversation = talk(llm, "hello", "and now?")
    assert capsys.readouterr().out == "A fine answer.\nA fine answer.\n\n"
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert llm.prompts[1] == conversation.messages[:3]


def test_system_message_comes_first() -> None:
    llm = FakeLLM()
    talk(llm, "hello", system="Be brief.")
    assert llm.prompts[0][0] == {"role": "system", "content": "Be brief."}


def test_reset_forgets_all_but_the_system_message() -> None:
    llm = FakeLLM()
    talk(llm, "hello", "/reset", "again", system="Be brief.")
    assert [message["content"] for message in llm.prompts[1]] == ["Be brief.", "again"]


def test_exit_ends_before_the_next_line() -> None:
    llm = FakeLLM()
    talk(llm, "/exit", "hello")
    assert llm.prompts == []


def test_empty_line_asks_nothing() -> None:
    llm = FakeLLM()
    talk(llm, "", "   ")
    assert llm.prompts == []


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    talk(FakeLLM(), "/help")
    output = capsys.readouterr().out
    assert all(name in output for name in ("/help", "/stats", "/reset", "/exit", "Ctrl-C", "Ctrl-D"))


def test_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    talk(llm, "/rest")
    assert "did you mean '/reset'" in capsys.readouterr().out
    assert llm.prompts == []


def test_stats_tell_the_acceptance_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    talk(FakeLLM(answer="abcdefgh", accepted=3), "hello", "/stats")
    output = capsys.readouterr().out
    assert "drafting: fake, K=3" in output
    assert "acceptance rate (accepted / drafted): 100.0%" in output
    assert "acceptance length (tokens per step): 4.00" in output
    assert "acceptance per position: 100% 100% 100%" in output


def test_stats_tell_what_each_drafter_has_earned(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.stats.speculation.record(Draft((1, 2), source="suffix"), (0,))
    talk(llm, "/stats")
    assert "accepted from suffix: 1 of 2 tokens in 1 drafts (50.0%)" in capsys.readouterr().out


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(answer="abcdefghijkl", accepted=3, before_step=press_ctrl_c_before_step(2))
    conversation = talk(llm, "hello")
    assert capsys.readouterr().out == "abcdefgh [stopped]\n\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "abcdefgh"}
    assert llm.num_closed == 1


def test_second_ctrl_c_stops_without_waiting_for_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    conversation = talk(FakeLLM(before_step=press_twice), "hello")
    assert capsys.readouterr().out == " [stopped]\n\n"
    assert conversation.messages == []


def test_ctrl_c_works_as_before_after_an_answer() -> None:
    before = signal.getsignal(signal.SIGINT)
    talk(FakeLLM(), "hello")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_does_not_leave(capsys: pytest.CaptureFixture[str]) -> None:
    talk(FakeLLM(), KeyboardInterrupt, "hello")
    assert "A fine answer." in capsys.readouterr().out


def test_question_that_does_not_fit_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(max_prompt=2)
    conversation = talk(llm, "one", "two")
    output = capsys.readouterr()
    assert "error: prompt: got 3 tokens" in output.err
    assert "/reset" in output.err
    assert [message["content"] for message in conversation.messages] == ["one", "A fine answer."]


def test_a_device_that_is_gone_ends_the_conversation() -> None:
    def fail() -> None:
        raise DeviceLostError("GPU: it computes no more; start anew")

    with pytest.raises(DeviceLostError):
        talk(FakeLLM(before_step=fail), "hello", "and now?")


def test_answer_cut_by_max_tokens_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(finish_reason="length")
    Conversation(llm, SamplingParams(max_tokens=1)).run(typed(["hello"]))  # type: ignore[arg-type]
    assert "[cut at --max-tokens 1]" in capsys.readouterr().out


def test_answer_cut_by_the_context_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(finish_reason="length")
    for most in (None, 10_000):
        Conversation(llm, SamplingParams(max_tokens=most)).run(typed(["hello"]))  # type: ignore[arg-type]
        assert "[cut: the context is full]" in capsys.readouterr().out


def test_command_reads_standard_input(loader: FakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: typed(["/exit"])())
    assert main(["chat", "m", "--system", "Be brief.", "--max-tokens", "5"]) == 0
    assert loader.models == ["m"]


def test_a_model_that_cannot_be_asked_is_named_before_the_first_question(
    loader: FakeLoader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTokenizer, "has_chat_template", False)
    assert main(["chat", "m"]) == 2
    assert capsys.readouterr().err.startswith("error: m: has no chat template, ")
