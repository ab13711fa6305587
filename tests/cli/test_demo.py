"""`forerun demo`: two runs, one comparison."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from forerun.cli.app import main
from forerun.cli.demo import DEFAULT_MODEL, DEFAULT_SPECULATION, WARM_UP_TOKENS, TokenPainter
from forerun.core.outputs import Origin, StreamDelta
from tests.cli.fakes import FakeLoader

GREEN, END = "\x1b[1;32m", "\x1b[0m"


def test_identical_texts_exit_with_0(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    output = capsys.readouterr().out
    assert output.count("A fine answer.") == 2
    assert "speed-up" in output


def test_different_texts_exit_with_1(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.llm.plain_answer = "Another answer."
    assert main(["demo"]) == 1
    assert "NO" in capsys.readouterr().out


def test_default_is_the_known_model_with_drafts(loader: FakeLoader) -> None:
    main(["demo"])
    assert loader.models == [DEFAULT_MODEL]
    assert loader.options[0].speculative_config == DEFAULT_SPECULATION


def test_other_model_and_drafts_replace_the_default(loader: FakeLoader) -> None:
    main(["demo", "other", "--speculative-config.method", "suffix"])
    assert loader.models == ["other"]
    assert loader.options[0].speculative_config == {"method": "suffix"}


def test_plain_run_has_speculation_off_and_drafted_run_has_not(loader: FakeLoader) -> None:
    main(["demo"])
    assert [params.speculation for params in loader.llm.params] == ["off", None, "off", None]


def test_an_answer_of_no_tokens_is_refused_before_a_model_is_loaded(
    loader: FakeLoader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--max-tokens", "0"]) == 2
    assert capsys.readouterr().err == "error: --max-tokens: got 0; must be 1 or more\n"
    assert loader.models == []


def test_warm_up_is_short(loader: FakeLoader) -> None:
    main(["demo", "--max-tokens", "99"])
    assert [params.max_tokens for params in loader.llm.params] == [WARM_UP_TOKENS, WARM_UP_TOKENS, 99, 99]


def test_timed_runs_share_neither_cache_nor_past_answers(loader: FakeLoader) -> None:
    main(["demo"])
    assert [prompt["cache_salt"] for prompt in loader.llm.prompts] == ["warm-up", "warm-up", "plain", "speculated"]


def test_acceptance_counts_the_drafted_run_alone(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.llm.answer = "abcdefgh"
    main(["demo", "--json"])
    speculation = json.loads(capsys.readouterr().out)["speculation"]
    assert (speculation["num_steps"], speculation["acceptance_rate"]) == (2, 1.0)


def test_json_is_one_line_of_these_keys(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert set(json.loads(output)) == {
        *("model", "speculative", "num_prompt_tokens", "plain", "speculated", "speculation", "speed_up", "identical"),
    }


def test_output_to_a_file_has_no_escape_codes(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo"])
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err


def delta(text: str, token_ids: Sequence[int], origins: Sequence[Origin]) -> StreamDelta:
    return StreamDelta(request_id="0", index=0, text=text, token_ids=list(token_ids), origins=list(origins))


def paint(deltas: Sequence[StreamDelta], words: Sequence[str], *, colour: bool = True) -> str:
    """What the painter prints where token i is the text `words[i]`."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=colour, color_system="standard" if colour else None, width=20)
    painter = TokenPainter(console, words.__getitem__)
    for each in deltas:
        painter(each)
    return file.getvalue()


def test_accepted_tokens_are_coloured_and_others_are_not() -> None:
    step = delta("one two", [0, 1], [Origin.ACCEPTED, Origin.BONUS])
    assert paint([step], ["one", " two"]) == f"{GREEN}one{END} two"


def test_neighbours_of_one_style_are_one_run_of_colour() -> None:
    step = delta("abc", [0, 1, 2], [Origin.ACCEPTED, Origin.ACCEPTED, Origin.RECOVERED])
    assert paint([step], ["a", "b", "c"]) == f"{GREEN}ab{END}c"


def test_text_that_lags_behind_keeps_its_own_token_style() -> None:
    steps = [
        delta("a", [0, 1], [Origin.RECOVERED, Origin.ACCEPTED]),
        delta("bbc", [2], [Origin.RECOVERED]),
    ]
    assert paint(steps, ["a", "bb", "c"]) == f"a{GREEN}bb{END}c"


def test_text_without_known_token_is_still_printed() -> None:
    assert paint([delta("a!", [0], [Origin.BONUS])], ["a"]) == "a!"


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(st.text("ab \n[]é", min_size=0, max_size=4), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_no_character_is_lost_or_doubled(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    texts = [text[low:high] for low, high in zip(borders, borders[1:], strict=False)]
    ids = list(range(len(words)))
    steps = [delta(texts[0], ids, [Origin.ACCEPTED] * len(ids)), *(delta(part, [], []) for part in texts[1:])]
    assert paint(steps, words, colour=False) == text


def test_a_demo_without_drafts_is_refused(loader: FakeLoader, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--no-speculation"]) == 2
    assert "--no-speculation: the demo shows what drafts gain; leave it out" in capsys.readouterr().err
