"""`forerun verify`: configurations that pass, configurations that fail, and the output."""

from __future__ import annotations

import json

import pytest

from forerun.cli.app import main
from forerun.proof.report import GreedyFinding, ProofReport
from forerun.proof.report import Verdict as Finding
from forerun.verify import matching
from forerun.verify.base import Verdict
from tests.native import needs_kernels
from tests.stand_in import save_stand_in

QUICK = ("--max-tokens", "16", "--num-samples", "200", "--max-model-len", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_stand_in(tmp_path_factory.mktemp("model")))


def test_an_honest_configuration_passes_and_shows_both_checks(model, capsys):
    assert main(["verify", model, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "with drafts against without" in shown
    assert "exact distribution" in shown
    assert "PASSED" in shown


@needs_kernels
@pytest.mark.parametrize("settings", [("--dtype", "bfloat16"), ("--quantization", "int8")], ids=["bf16", "int8"])
def test_on_the_native_kernels_texts_are_bit_identical(model, capsys, settings):
    assert main(["verify", model, *QUICK, *settings]) == 0
    assert "PASSED: bit-identical" in capsys.readouterr().out


def test_json_is_one_line_with_every_finding(model, capsys):
    assert main(["verify", model, *QUICK, "--json", "--speculative-config.method", "suffix"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["passed"] is True
    assert {finding["verdict"] for finding in report["greedy"]} <= {"bit-identical", "equal"}
    assert [finding["drafter"] for finding in report["sampled"]] == ["suffix, K=24", "adversarial"]


def test_a_bug_planted_in_the_verifier_fails(model, capsys, monkeypatch):
    def accept_everything(draft, target):
        last = len(draft) - 1 if draft.is_chain else -1
        return Verdict(tuple(range(last + 1)), target.token(last))

    monkeypatch.setattr(matching, "match", accept_everything)
    assert main(["verify", model, *QUICK]) == 1
    shown = capsys.readouterr().out
    assert "bug" in shown
    assert "FAILED" in shown


@pytest.mark.parametrize(
    "verifier",
    [
        {"rejection_sample_method": "threshold", "acceptance_threshold": 0.01},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.9, 0.9, 0.9, 0.9]},
    ],
    ids=lambda verifier: verifier["rejection_sample_method"],
)
def test_a_lossy_configuration_fails_and_is_called_lossy(model, capsys, verifier):
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    lossy = ("--speculative-config", json.dumps(ngram | verifier))
    assert main(["verify", model, *QUICK, *lossy]) == 1
    assert "lossy by design" in capsys.readouterr().out


def test_samples_that_could_tell_nothing_are_no_proof(model, capsys):
    assert main(["verify", model, *QUICK[:2], *QUICK[4:], "--num-samples", "1"]) == 1
    shown = capsys.readouterr().out
    assert "untested" in shown
    assert "FAILED: the sampled check tested no draft" in " ".join(shown.split())


def test_prompts_come_from_a_file(model, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one two one two one two\n\nthree four three four\n")
    assert main(["verify", model, *QUICK, "--json", "--prompts", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [finding["prompt"] for finding in report["greedy"]] == ["one two one two one two", "three four three four"]


def test_prompts_and_tokens_are_shown_as_they_are(model, capsys, monkeypatch):
    finding = GreedyFinding(
        prompt="x[i] [/INST] :key:",
        num_tokens=2,
        num_draft_tokens=1,
        num_accepted_tokens=1,
        verdict=Finding.TIE,
        position=1,
        gap=0.1,
        plain_token="[/a]",
        speculated_token="[b]",
    )
    report = ProofReport(
        model="m", configuration="c", dtype="float32", is_lossless_by_design=True, greedy=[finding], sampled=[]
    )
    monkeypatch.setattr("forerun.proof.run.prove", lambda *_, **__: report)
    main(["verify", model])
    shown = capsys.readouterr().out
    assert "x[i] [/INST] :key:" in shown
    assert all(token in "".join(shown.split()) for token in ("'[/a]'", "'[b]'"))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--prompts", "no-such-file.txt"), "cannot read no-such-file.txt"),
        (("--num-samples", "0"), "--num-samples: got 0"),
        (("--max-tokens", "-1"), "--max-tokens: got -1"),
        (("--no-speculation",), "--no-speculation: verify checks what drafts do; leave it out"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_two(model, capsys, options, hint):
    assert main(["verify", model, *options]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
