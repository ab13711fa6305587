"""`forerun bench compare`: its output and its refusals."""

from __future__ import annotations

import json
import re

import pytest

from forerun.bench import instruments
from forerun.bench.prompts import WORKLOADS
from forerun.cli import loading
from forerun.cli.app import main
from tests.bench.interruptions import interrupt
from tests.stand_in import save_stand_in


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)


@pytest.fixture
def compare(tmp_path_factory, tmp_path, capsys):
    """Compare ways to draft for a tiny chat model; what is printed."""
    model = save_stand_in(tmp_path_factory.mktemp("chat-model"))
    (tmp_path / "configs.yaml").write_text(
        "ngram: {method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1}\n"
        "lossy: {method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1, "
        "rejection_sample_method: synthetic, synthetic_acceptance_length: 3}\n"
    )
    (tmp_path / "chat.txt").write_text("to be or not to be\na b a b a b\n")

    def compare(*options, prompts=("--prompts", str(tmp_path / "chat.txt")), repeats=1, code=0):
        files = ("--configs", str(tmp_path / "configs.yaml"), *prompts)
        words = ("--max-tokens", "24", "--repeats", str(repeats), *options)
        assert main(["bench", "compare", str(model), *files, *words]) == code
        return capsys.readouterr().out

    return compare


def test_compare_shows_speeds_acceptance_phases_and_texts(compare):
    shown = compare()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["chat", "plain", "ngram", "lossy"] * 3
    assert [row[4] for row in rows[1:3]] == ["identical", "identical"]
    assert rows[3][4].endswith("of 2 differ (lossy)")
    assert all(word in shown for word in ("speed-up", "acceptance rate", "acceptance length", "schedule", "draft"))


def test_compare_says_what_each_of_several_drafters_earned(compare, tmp_path):
    (tmp_path / "configs.yaml").write_text("chosen: auto\nngram: {method: ngram, num_speculative_tokens: 3}\n")
    lines = "".join(compare(prompts=())).split("Drafters: ")
    assert len(lines) > 2
    assert all("rows and +" in line for line in lines[1:])
    assert any(line.startswith("copy ") for line in lines)


def test_compare_says_what_a_choice_of_lengths_was_worth(compare, tmp_path):
    (tmp_path / "configs.yaml").write_text("chosen: auto\nngram: {method: ngram, num_speculative_tokens: 3}\n")
    shown = " ".join(compare(prompts=()).split())
    assert re.findall(r"(\w+): Estimated generation throughput: [\d.]+ tokens/s with drafts", shown) == ["chosen"]
    assert "Regret against" in shown
    assert json.loads(compare("--json", prompts=()))["reports"]["chosen"].keys() >= {"regret", "best_static_length"}


def test_compare_json_is_one_line_with_every_outcome(compare):
    (line,) = compare("--json").splitlines()
    report = json.loads(line)
    found = {outcome["name"]: outcome for outcome in report["outcomes"]}
    assert [(name, one["identical"]) for name, one in found.items()] == [
        ("plain", True),
        ("ngram", True),
        ("lossy", False),
    ]
    assert found["ngram"]["speculation"]["num_draft_tokens"] > 0
    assert report["configs"]["ngram"]["method"] == "ngram"
    assert report["gigabytes_per_second"] > 0


def test_names_with_brackets_in_them_are_shown_as_they_are(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    prompts = tmp_path / "chat[red].txt"
    prompts.write_text("to be or not to be\na b a b a b\n")
    (tmp_path / "configs.yaml").write_text("chosen[/b]: auto")
    shown = compare(prompts=("--prompts", str(prompts)))
    assert (
        shown.count("chat[red]") == shown.count("chosen[/b]") == 4
    )  # in three tables, and in what is said of its drafters
    assert "chosen[/b], chat[red]: Drafters: " in shown


def test_compare_draws_a_picture(compare, tmp_path):
    pytest.importorskip("matplotlib")
    compare("--picture", str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_compare_has_prompts_of_its_own(compare):
    outcomes = json.loads(compare("--json", "--num-prompts", "1", prompts=()))["outcomes"]
    assert {outcome["kind"] for outcome in outcomes} == set(WORKLOADS)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--configs", "absent.yaml"), "--configs: cannot read absent.yaml"),
        (("--prompts", "absent.txt"), "--prompts: cannot read absent.txt"),
        (("--repeats", "0"), "repeats: got 0; must be 1 or more"),
        (("--temperature", "-1"), "temperature: got -1.0; must be 0 or more"),
        (("--batch-size", "4", "--max-num-seqs", "2"), "batch_size: got 4; max_num_seqs is 2"),
        (("--dtype", "int3"), "dtype: got 'int3'"),
        (("--picture", "picture.doc"), "--picture: cannot write picture.doc"),
        (("--speculative-config.method", "suffix"), "takes its configurations from --configs"),
        (
            ("--no-speculation",),
            "--no-speculation: bench compare decodes plainly as well, to compare with; leave it out",
        ),
        (("--kv-transfer-config.kv-role", "kv_producer"), "bench compare saves no hidden states"),
    ],
)
def test_a_mistake_in_a_comparison_is_one_line_before_any_model_is_loaded(
    arguments, hint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loading, "load_target", lambda settings: pytest.fail("loaded"))
    (tmp_path / "good.yaml").write_text("suffix: {method: suffix}")
    configs = () if "--configs" in arguments else ("--configs", str(tmp_path / "good.yaml"))
    assert main(["bench", "compare", "m", *configs, *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


def test_after_ctrl_c_the_whole_rounds_are_compared(compare, monkeypatch):
    interrupt(monkeypatch, instruments.BandwidthProbe, "measure", at=2)
    report = json.loads(compare("--json", repeats=3, code=130))
    assert (report["interrupted"], report["repeats"], len(report["outcomes"])) == (True, 1, 3)
