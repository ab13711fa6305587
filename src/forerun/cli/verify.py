"""`forerun verify`: checks that a configuration is lossless on this model and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.console import plain_console, status
from forerun.cli.input_files import read_lines
from forerun.cli.options import EngineOptions, JsonFlag
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.proof.report import ProofReport

ENGINE = EngineOptions()
FAILED = 1

REMEDIES = {
    "greedy": "give prompts that are drafted for, or more tokens (--max-tokens)",
    "sampled": "give more samples (--num-samples)",
}


@command
def verify(
    model: str,
    /,
    *,
    prompts_file: Annotated[Path | None, Parameter(name="--prompts")] = None,
    max_tokens: int = 64,
    num_samples: int = 1000,
    json_output: JsonFlag = False,
    engine: EngineOptions = ENGINE,
) -> int:
    """Prove that drafting does not change what the model writes.

    Greedy: each prompt is decoded with and without drafts. On the native CPU kernels and on a GPU's
    text and logprobs must be bit-identical; elsewhere, where the texts part, the gap between the model's
    two best tokens tells a numerical tie from a bug. Sampled: texts over a few tokens
    are compared with the model's exact distribution by a chi-square test, with your drafter and
    then with an adversarial one. The exit code is 0 if all is well and 1 if not.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        prompts_file: A text file with one prompt per line for the greedy check, instead of the built-in ones.
        max_tokens: Tokens per prompt in the greedy check.
        num_samples: Samples per sampled check; more find smaller faults.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun verify smollm2-135m
        forerun verify smollm2-135m --speculative-config.method suffix --num-samples 4000
    """
    from forerun.proof.run import PROMPTS, prove  # torch: only when it is needed

    _check_positive(max_tokens=max_tokens, num_samples=num_samples)
    if engine.no_speculation:
        raise ConfigError("--no-speculation: verify checks what drafts do; leave it out")
    prompts = PROMPTS if prompts_file is None else read_lines(prompts_file)
    loading.pull_if_needed(model)
    with status() as progress:
        report = prove(
            model,
            speculative_config=engine.asked_speculation(),
            settings=engine.plain_settings(),
            prompts=prompts,
            max_tokens=max_tokens,
            num_samples=num_samples,
            progress=progress,
        )
    if json_output:
        print(json.dumps(report.as_json()))
    else:
        show(report, plain_console())
    return 0 if report.passed else FAILED


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}; must be 1 or more")


def show(report: ProofReport, console: Console) -> None:
    """Print the report."""
    console.print(f"model {report.model}, {report.dtype}\nconfiguration {report.configuration}")
    console.print(_greedy_table(report))
    console.print(_sampled_table(report))
    if not report.is_lossless_by_design:
        console.print("this configuration is lossy by design: differences are expected")
    console.print(_conclusion(report))


def _conclusion(report: ProofReport) -> str:
    if report.untested:
        return "; ".join(f"FAILED: the {kind} check tested no draft; {REMEDIES[kind]}" for kind in report.untested)
    if not report.passed:
        return "FAILED: see the verdicts above"
    if report.is_bit_identical:
        return "PASSED: bit-identical; drafting changed no bit of the text and its logprobs"
    num_ties = sum(finding.verdict == "numerical tie" for finding in report.greedy)
    if num_ties:
        return f"PASSED: drafting changed nothing but {num_ties} numerical tie(s)"
    return "PASSED: drafting did not change the text"


def _greedy_table(report: ProofReport) -> Table:
    table = Table(title="greedy: with drafts against without")
    table.add_column("prompt", no_wrap=True, max_width=30)
    for name in ("tokens", "drafted", "accepted"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for finding in report.greedy:
        where = ""
        if finding.position is not None:
            where = f" at token {finding.position}"
        if finding.gap is not None:
            where += f": {finding.plain_token!r} / {finding.speculated_token!r}, gap {finding.gap:.2g}"
        table.add_row(
            " ".join(finding.prompt.split()),
            str(finding.num_tokens),
            str(finding.num_draft_tokens),
            str(finding.num_accepted_tokens),
            finding.verdict.value + where,
        )
    return table


def _sampled_table(report: ProofReport) -> Table:
    table = Table(title="sampled: against the model's exact distribution")
    table.add_column("drafter", no_wrap=True)
    for name in ("samples", "drafted", "accepted", "chi²", "df", "limit"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for finding in report.sampled:
        table.add_row(
            finding.drafter,
            str(finding.num_samples),
            str(finding.num_draft_tokens),
            str(finding.num_accepted_tokens),
            f"{finding.statistic:.1f}",
            str(finding.degrees_of_freedom),
            f"{finding.threshold:.1f}",
            finding.verdict.value,
        )
    return table
