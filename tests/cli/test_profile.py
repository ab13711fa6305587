"""`forerun profile`: a folder from a command line, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.bench.profiling.profiler import Profiler
from forerun.bench.profiling.stages import STAGES, open_stages
from forerun.cli import profile
from forerun.cli.app import INTERRUPTED, main
from forerun.core.held_folder import held_folder
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.profile import SERVERS_KERNELS, Profile
from forerun.plan.step_times import DraftingCost
from tests.plan.profiles import fake_profile
from tests.stand_in import save_stand_in

QUICK = [
    *("--input-lengths", "4,8,16", "--num-sequences", "1,2", "--contexts", "8,24", "--draft-lengths", "1"),
    *("--rounds", "1", "--num-texts", "1", "--max-tokens", "16"),
]


def test_a_profile_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = save_stand_in(tmp_path / "model"), tmp_path / "profile"  # type: ignore[no-untyped-call]
    prompts = tmp_path / "facts.txt"
    prompts.write_text("the sea is salt\n")
    configs = tmp_path / "configs.yaml"
    configs.write_text("ours: {method: ngram, num_speculative_tokens: 2}\n")
    words = ["profile", str(model), "--output-dir", str(folder), "--prompts", str(prompts), "--configs", str(configs)]
    assert main([*words, *QUICK]) == 0
    shown = capsys.readouterr()
    assert "written to" in shown.out
    assert "about" in shown.err
    found = Profile.load(folder)
    assert list(found.configs) == ["ours"]
    assert found.conditions["grid"]["draft_lengths"] == [0, 1]
    assert main([*words, *QUICK]) == 2
    assert "has a profile already" in capsys.readouterr().err
    assert main([*words, *QUICK, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["configs"] == found.configs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "60"], "a time above 0 with its units"),
        (["--budget", "60s", "--rounds", "2"], "leave one out"),
        (["--rounds", "0"], "rounds: got 0"),
        (["--num-sequences", "1,2", "--contexts", "8"], "num_sequences, contexts: got 2 batches"),
        (["--input-lengths", "5"], "input_lengths: got 1 different value"),
        (["--speculative-config.method", "suffix"], "takes configurations from --configs"),
        (["--server", "http://127.0.0.1:9", "--budget", "60s"], "leave them out"),
        (["--server", "http://127.0.0.1:9", "--device", "cpu"], "leave them out"),
        (["--server", "http://127.0.0.1:9", "--temperature", "0.7"], "leave them out"),
        (["--server", "http://127.0.0.1:9", "--draft-lengths", "1,2"], "leave them out"),
        (["--temperature", "-1"], "--temperature: got -1.0; must be 0 or more"),
        (["--temperature", "nan"], "--temperature: got nan; must be 0 or more"),
        (["--kv-transfer-config.kv-role", "kv_producer"], "profile saves no hidden states"),
        (["--seed", "3"], "--seed: a profile's answers are drawn by the numbers of their prompts"),
        (["--server", "http://127.0.0.1:9", "--dtype", "float32", "--tensor-parallel-size", "2"], "no server answers"),
        (["--server", "http://127.0.0.1:9", "--speculative-config.num_speculative_tokens", "2"], "got method None"),
        (["--merge", "a", "--server", "http://127.0.0.1:9"], "leave out --server"),
        (["--merge", "a", "--rounds", "2"], "nothing is measured"),
        (["--merge", "a", "b/a"], "give folders of different names"),
        (["--merge", "a", "b"], "a: has no profile.json"),
        (["--server", "localhost"], "must be a URL"),
        (
            ["--server", "http://127.0.0.1:9", "--max-num-batched-tokens", "0"],
            "--max-num-batched-tokens: got 0; must be",
        ),
        (["--server", "http://127.0.0.1:9", "--tensor-parallel-size", "0"], "--tensor-parallel-size: got 0; must be"),
        (["--server", "http://127.0.0.1:9"], "no server answers"),
        (["--num-kv-tokens", "100"], "is for --server"),
        (
            [
                "--server",
                "http://127.0.0.1:9",
                "--speculative-config",
                '{"method": "suffix", "num_speculative_tokens": null}',
            ],
            "--speculative-config: got num_speculative_tokens=None; must be a whole number",
        ),
        (["--output-dir", "pyproject.toml"], "Not a directory"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "no/such-model", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "folder"),
    [("org/name", "profile-name"), ("models/a.gguf", "profile-a.gguf"), (".", "profile-here"), ("./", "profile-here")],
)
def test_the_folder_is_called_after_the_model(
    model: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert profile._default_folder(model) == Path(folder)


def test_profiles_of_a_server_are_put_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = replace(
        fake_profile(), kernels=SERVERS_KERNELS, machine="http://here", configs={}, drafting={}, acceptance={}
    )
    drafting = replace(
        plain,
        has_plain_steps=False,
        configs={"server": {"method": "suffix", "num_speculative_tokens": 2}},
        served_steps={"server": plain.step_times},
        drafting={"server": DraftingCost()},
        acceptance={"server": AcceptanceProfile(method="suffix", conditional=(0.5, 0.5))},
    )
    plain.save(tmp_path / "plain")
    drafting.save(tmp_path / "served-suffix")
    words = ["profile", "tiny", "--merge", str(tmp_path / "plain"), str(tmp_path / "served-suffix")]
    assert main([*words, "--output-dir", str(tmp_path / "both")]) == 0
    assert "served-suffix" in capsys.readouterr().out
    found = Profile.load(tmp_path / "both")
    assert (found.has_plain_steps, list(found.configs)) == (True, ["served-suffix"])
    assert main([*words, "--output-dir", str(tmp_path / "both")]) == 2
    assert "has a profile already" in capsys.readouterr().err
    assert main(["profile", "other", *words[2:], "--output-dir", str(tmp_path / "new")]) == 2
    assert "another model" in capsys.readouterr().err
    begun = tmp_path / "begun"
    open_stages(begun, {}).keep("round-0", {})
    assert main([*words, "--output-dir", str(begun)]) == 2
    assert "has an unfinished profile, which would be lost" in capsys.readouterr().err
    with held_folder(begun, "--output-dir", "measures"):
        assert main([*words, "--output-dir", str(begun), "--overwrite"]) == 2
    assert "another process measures into" in capsys.readouterr().err
    assert (begun / STAGES).exists(), "which is that one's"
    assert main([*words, "--output-dir", str(begun), "--overwrite"]) == 0
    assert not (begun / STAGES).exists(), "an earlier profile is deleted"
    assert main([*words, "--output-dir", str(tmp_path / "plain"), "--overwrite"]) == 2
    assert "is one of --merge and would be lost" in capsys.readouterr().err
    assert Profile.load(tmp_path / "plain") == plain


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the same command goes on from here"),
        (["--overwrite"], "the same command without --overwrite goes on from here"),
    ],
)
def test_whoever_interrupts_a_profile_is_told_that_it_goes_on(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(measuring: Profiler) -> Profile:
        (measuring.folder / STAGES).mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "_local", lambda *_: (None, None))
    monkeypatch.setattr(Profiler, "run", interrupted)
    assert main(["profile", "tiny", "--output-dir", str(tmp_path / "p"), *words]) == INTERRUPTED
    assert capsys.readouterr().err.endswith(f"interrupted: {told}\n")


def test_an_interruption_before_anything_is_kept_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Profiler) -> Profile:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "_local", lambda *_: (None, None))
    monkeypatch.setattr(Profiler, "run", interrupted)
    assert main(["profile", "tiny", "--output-dir", str(tmp_path / "p")]) == INTERRUPTED
    assert "interrupted" not in capsys.readouterr().err
