"""`forerun bench replay`: it records once, judges, and says what is wrong."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from forerun.bench.recording import read_recording
from forerun.cli.app import main
from forerun.llm import LLM
from tests.stand_in import save_stand_in


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A recording of a tiny chat model, and configurations."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "configs.yaml").write_text(
        "ngram: {method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1}\n"
        "suffix: {method: suffix, num_speculative_tokens: 3}\n"
    )
    (folder / "chat.txt").write_text("to be or not to be\na b a b a b\n")
    model = save_stand_in(folder / "model")
    recording = ("--model", str(model), "--prompts", str(folder / "chat.txt"), "--max-tokens", "16")
    assert run(folder, *recording, "--json") == 0
    return folder


def run(folder, *options):
    return main(
        ["bench", "replay", str(folder / "texts.jsonl.gz"), "--configs", str(folder / "configs.yaml"), *options]
    )


def test_it_shows_each_configuration_on_each_kind_without_the_model(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run(files) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    names = [row[0] for row in rows if row]
    assert names == ["chat (2)", "ngram", "suffix", "chat, temperature 1 (2)", "ngram", "suffix"]


def test_json_is_one_line_with_every_outcome(files, capsys, tmp_path):
    assert run(files, "--json", "--output-json", str(tmp_path / "out.json")) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert [(one["kind"], one["name"]) for one in report["outcomes"]] == [
        ("chat", "ngram"),
        ("chat", "suffix"),
        ("chat, temperature 1", "ngram"),
        ("chat, temperature 1", "suffix"),
    ]
    assert all(one["tokens_per_step"] >= 1 for one in report["outcomes"])


def test_costs_may_be_a_measured_curve(files, capsys, tmp_path):
    points = [
        {"context": 256, "num_sequences": 1, "rows": rows, "ratio": ratio, "milliseconds": 5 * ratio}
        for rows, ratio in ((1, 1.0), (8, 9.0))
    ]
    (tmp_path / "curve.json").write_text(json.dumps({"points": points}))
    for costs in ("steep", str(tmp_path / "curve.json")):
        assert run(files, "--json", "--costs", costs) == 0
    steep, measured = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert measured["costs"] == {"rows": [1, 8], "ratios": [1.0, 9.0], "seconds": 0.005}
    for one, other in zip(measured["outcomes"], steep["outcomes"], strict=True):
        assert one["speed_up"] < other["speed_up"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--costs", "gentle"), "costs: cannot read gentle"),
        (("--temperatures", "0,warm"), "must be numbers of 0 or more with commas between them"),
        (("--temperatures", "-1"), "must be numbers of 0 or more with commas between them"),
        (("--seed", "3"), "--seed: each text has the number of its prompt as its seed; leave it out"),
    ],
)
def test_wrong_options_are_named(files, capsys, options, message):
    assert run(files, *options) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "another-model"),
        ("--dtype", "float64"),
        ("--quantization", "int8"),
        ("--activation-dtype", "int8"),
        ("--load-format", "dummy"),
        ("--max-tokens", "256"),
        ("--max-tokens", "32"),
        ("--temperatures", "1"),
        ("--temperatures", "0.5"),
        ("--prompts", "one.txt"),
    ],
)
def test_texts_other_than_those_recorded_are_refused(files, capsys, tmp_path, monkeypatch, option, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("one prompt\n")
    assert run(files, option, value) == 2
    error = capsys.readouterr().err
    assert f"{option}: got " in error
    assert "was recorded with" in error


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            "--max-tokens",
            "--max-tokens: by default 256; .* was recorded with 16; say so with --max-tokens, leave out --model",
        ),
        ("--prompts", "--prompts: by default .*code edit"),
    ],
)
def test_what_is_left_out_beside_a_model_is_asked_for_as_by_default(files, capsys, left_out, said):
    given = {"--model": files / "model", "--prompts": files / "chat.txt", "--max-tokens": 16}
    del given[left_out]
    assert run(files, *(str(word) for option in given.items() for word in option)) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_temperature_that_is_given_twice_is_recorded_once(files, tmp_path, capsys):
    words = (
        "--model",
        str(files / "model"),
        "--prompts",
        str(files / "chat.txt"),
        "--max-tokens",
        "8",
        "--temperatures",
        "0,0",
    )
    command = [
        "bench",
        "replay",
        str(tmp_path / "texts.jsonl"),
        "--configs",
        str(files / "configs.yaml"),
        *words,
        "--json",
    ]
    for _ in range(2):
        assert main(command) == 0
        assert {one["num_texts"] for one in json.loads(capsys.readouterr().out)["outcomes"]} == {2}


def test_the_command_that_recorded_can_be_given_again(files):
    recording = ("--model", str(files / "model"), "--prompts", str(files / "chat.txt"), "--max-tokens", "16")
    assert run(files, *recording) == 0
    assert run(files, *recording, "--temperatures", "0,1") == 0


@pytest.mark.parametrize("with_model", [False, True])
def test_as_many_other_prompts_are_refused(files, capsys, tmp_path, with_model):
    other = tmp_path / "chat.txt"
    other.write_text("to be or not to be\nsomething else\n")
    model = ("--model", str(files / "model"), "--max-tokens", "16") if with_model else ()
    assert run(files, "--prompts", str(other), *model) == 2
    error = capsys.readouterr().err
    assert "--prompts: got 'something else' as number 2 of 'chat'" in error
    assert "leave the options of recording out, or give another file to record" in error


def recording_with(folder, head, text=None):
    """A copy of the recording, with other entries of its first line, and of its texts."""
    with gzip.open(folder / "texts.jsonl.gz", "rt") as file:
        first, *texts = map(json.loads, file)
    path = folder / "other.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (first | head, *(one | (text or {}) for one in texts))))
    return path


def test_rounded_weights_that_were_recorded_must_be_asked_for_beside_a_model(files, capsys):
    path = recording_with(files, {"kernels": "native avx2, int8 weights, 2 threads"})
    command = ["bench", "replay", str(path), "--configs", str(files / "configs.yaml")]
    model = ("--model", str(files / "model"), "--prompts", str(files / "chat.txt"), "--max-tokens", "16")
    assert main([*command, *model]) == 2
    assert "--quantization: by default None; " in capsys.readouterr().err
    assert main([*command, *model, "--quantization", "int8"]) == 0


@pytest.mark.parametrize(
    ("recorded", "asked", "status"),
    [
        ("int16 activations", [], 0),
        ("int16 activations", ["int16"], 0),
        ("int16 activations", ["bfloat16"], 2),
        ("2 threads", ["bfloat16"], 0),
        ("2 threads", ["int16"], 2),
        ("int8 activations", [], 2),
        ("int8 activations", ["int8"], 0),
    ],
)
def test_activations_that_were_recorded_must_be_those_asked_for_or_what_auto_takes(files, recorded, asked, status):
    path = recording_with(files, {"kernels": f"native avx2, {recorded}"})
    command = ["bench", "replay", str(path), "--configs", str(files / "configs.yaml")]
    model = ("--model", str(files / "model"), "--prompts", str(files / "chat.txt"), "--max-tokens", "16")
    assert main([*command, *model, *(word for name in asked for word in ("--activation-dtype", name))]) == status


def test_texts_of_one_token_are_refused(files, capsys):
    path = recording_with(files, {}, {"answer": [5], "top": [[5]], "logprobs": [[-0.1]]})
    assert main(["bench", "replay", str(path), "--configs", str(files / "configs.yaml")]) == 2
    assert "has no text of two tokens or more" in capsys.readouterr().err


def test_prompts_are_refused_where_the_model_that_read_them_is_gone(files, capsys, tmp_path):
    path = recording_with(files, {"model": str(tmp_path / "gone")})
    command = ["bench", "replay", str(path), "--configs", str(files / "configs.yaml")]
    assert main(command) == 0
    assert main([*command, "--prompts", str(files / "chat.txt")]) == 2
    assert "leave --prompts and --model out to take the file as it is" in capsys.readouterr().err


def test_an_interrupted_recording_goes_on_when_the_command_is_given_again(files, capsys, tmp_path, monkeypatch):
    generate, sizes = LLM.generate, []

    def interrupted(self, prompts, *args, **options):
        sizes.append(len(prompts))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return generate(self, prompts, *args, **options)

    monkeypatch.setattr(LLM, "generate", interrupted)
    words = ("--model", str(files / "model"), "--prompts", str(files / "chat.txt"), "--max-tokens", "16")
    path = tmp_path / "texts.jsonl.gz"
    command = ["bench", "replay", str(path), "--configs", str(files / "configs.yaml"), *words, "--max-num-seqs", "2"]
    assert main(command) == 130
    assert "interrupted: the same command goes on from here" in capsys.readouterr().err
    assert not path.exists()
    assert main(command) == 0
    assert sizes == [2, 2, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["texts.jsonl.gz"]
    answers = [[text.answer_ids for text in read_recording(one).texts] for one in (path, files / "texts.jsonl.gz")]
    assert answers[0] == answers[1]


def test_without_a_recording_a_model_must_be_named(files, tmp_path, capsys):
    configs = str(files / "configs.yaml")
    assert main(["bench", "replay", str(tmp_path / "none.jsonl"), "--configs", configs]) != 0
    assert "give a recording, or --model to record one there" in " ".join(capsys.readouterr().err.split())


def test_a_recording_into_no_folder_is_refused_before_the_model_is_loaded(files, tmp_path, capsys):
    configs = str(files / "configs.yaml")
    path = str(tmp_path / "no" / "texts.jsonl")
    assert main(["bench", "replay", path, "--configs", configs, "--model", "no-such-model"]) != 0
    assert "give a file in a folder that exists" in " ".join(capsys.readouterr().err.split())
