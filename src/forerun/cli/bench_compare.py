"""`forerun bench compare`: speculative configurations against plain decoding, on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.bench.workloads import ComparisonWorkload
from forerun.cli import loading
from forerun.cli.console import plain_console, status
from forerun.cli.input_files import Prompt, read_configs, read_kinds
from forerun.cli.interruption import until_interrupted
from forerun.cli.options import REPORT, WORKLOAD, EngineOptions, Paths, ReportOptions, check_picture
from forerun.cli.speculation_figures import speculation_json
from forerun.core.stats import PHASES
from forerun.engine.stats import drafters_line, report_line
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.outcomes import Comparison, Outcome

ENGINE, COMPARISON = EngineOptions(), ComparisonWorkload()

ACCEPTED_COLUMN = "accepted at position 1, 2, ... (%)"
TEXT_COLUMNS = ("texts", ACCEPTED_COLUMN)


def compare(
    model: str,
    *,
    configs: Path,
    prompts: Paths = None,
    picture: Path | None = None,
    workload: Annotated[ComparisonWorkload, WORKLOAD] = COMPARISON,
    report: ReportOptions = REPORT,
    engine: EngineOptions = ENGINE,
) -> None:
    """Run speculative configurations in turn against plain decoding, on the same prompts.

    Shows speed, acceptance, the time of each phase of a step, and whether the texts are the same.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        configs: A YAML or JSON file: names with a speculative_config each, or a list of these.
        prompts: Files, each a kind of prompts: .txt with one per line, or .jsonl with "prompt", "question",
            "turns" or "messages"; by default built-in code edits, questions about a text, and chat.
        picture: Draw speeds and phases to this .png, .svg or .pdf file (needs the extra "bench").
    """
    from forerun.bench.compare import check_batch_size, measure_comparison  # torch: only when it is needed
    from forerun.bench.prompts import WORKLOADS, encode_prompt
    from forerun.config.settings import EngineSettings
    from forerun.proof.greedy import is_near_tie

    check_picture("--picture", picture)
    _refuse_speculation(engine)
    named = read_configs(configs)
    kinds: Mapping[str, Sequence[Prompt]] = WORKLOADS if prompts is None else read_kinds(prompts)
    settings = EngineSettings.from_keywords(model, engine.without_pools().plain_settings())
    check_batch_size(settings, workload)
    target = loading.load_target(settings)
    if target.tokenizer is None:
        raise ConfigError(f"prompts: {model} has no tokenizer to read them with; give a folder that holds one")
    token_ids = {kind: [encode_prompt(target.tokenizer, text) for text in texts] for kind, texts in kinds.items()}
    with status() as progress:
        measure = partial(measure_comparison, target, settings, named, token_ids, workload, judge=is_near_tie)
        found, is_interrupted = until_interrupted(partial(measure, progress=progress))
    report.write({**as_json(found), "interrupted": is_interrupted}, show=lambda: _show(found, plain_console()))
    if picture is not None:
        from forerun.bench.picture import draw_comparison  # matplotlib: only when it is needed

        draw_comparison(found, picture)
    if is_interrupted:
        raise KeyboardInterrupt


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    outcomes = [
        {**outcome.to_json(), "speculation": speculation_json(outcome.speculation)} for outcome in found.outcomes
    ]
    return {**found.to_json(), "outcomes": outcomes}


def _refuse_speculation(engine: EngineOptions) -> None:
    if engine.no_speculation:
        raise ConfigError("--no-speculation: bench compare decodes plainly as well, to compare with; leave it out")
    if engine.names_drafter:
        raise ConfigError(
            "--speculative-config: bench compare takes its configurations from --configs; write this one there"
        )
    if engine.kv_transfer_config is not None:
        raise ConfigError("--kv-transfer-config: bench compare saves no hidden states; leave it out")


def _show(found: Comparison, console: Console) -> None:
    """Print the circumstances, tables of speeds, acceptance and phases, and notes."""
    console.print(f"{found.machine}\n{found.model}, {found.dtype} on {found.device}, kernels: {found.kernels}")
    console.print(
        f"up to {found.max_tokens} tokens, {found.batch_size} prompt(s) at once, temperature {found.temperature:g}, "
        f"memory {found.gigabytes_per_second:.1f} GB/s"
    )
    console.print(_table(f"answers, medians of {found.repeats} interleaved rounds", found, _speeds))
    console.print(_table("drafts", found, _acceptance))
    phases = [phase for phase in PHASES if any(one.milliseconds_per_step.get(phase) for one in found.outcomes)]
    console.print(_table("a step of decoding, ms", found, lambda one: _phases(one, phases)))
    for outcome in found.outcomes:
        if outcome.speculation.by_drafter:
            console.print(f"{outcome.name}, {outcome.kind}: {drafters_line(outcome.speculation)}")
        for note in _notes(outcome):
            console.print(f"{outcome.name}, {outcome.kind}: {note}")
    for name, report in found.reports.items():
        console.print(f"{name}: {report_line(report)}")


def _table(title: str, found: Comparison, cells: Callable[[Outcome], dict[str, str]]) -> Table:
    """A table with a row for each outcome, grouped by the kind of prompts."""
    table = Table(title=title)
    table.add_column("")
    for name in cells(found.outcomes[0]):
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for kind, outcomes in found.by_kind.items():
        table.add_section()
        table.add_row(Text(kind, style="bold"))
        for outcome in outcomes:
            table.add_row(f"  {outcome.name}", *cells(outcome).values())
    return table


def _speeds(one: Outcome) -> dict[str, str]:
    return {
        "tokens/s": f"{one.tokens_per_second:.1f}",
        "speed-up": f"{one.speed_up:.2f}",
        "of decoding": "-" if one.decode_speed_up is None else f"{one.decode_speed_up:.2f}",
        "texts": one.texts,
    }


def _acceptance(one: Outcome) -> dict[str, str]:
    rate, length = one.speculation.acceptance_rate, one.speculation.acceptance_length
    return {
        "acceptance rate": "-" if rate is None else f"{rate:.1%}",
        "acceptance length": "-" if length is None else f"{length:.2f}",
        ACCEPTED_COLUMN: " ".join(f"{100 * share:.0f}" for share in one.speculation.acceptance_per_position),
    }


def _phases(one: Outcome, phases: Sequence[str]) -> dict[str, str]:
    times = one.milliseconds_per_step
    return {phase: f"{times[phase]:.2f}" if times else "-" for phase in phases}


def _notes(outcome: Outcome) -> list[str]:
    """Warnings: failed drafts, and texts that differ although they must not."""
    notes = []
    if outcome.num_failed_drafts:
        notes.append(f"the drafter failed {outcome.num_failed_drafts} time(s), see the warning above")
    unexplained = 0 if outcome.num_near_ties is None else outcome.num_differing - outcome.num_near_ties
    if outcome.must_be_identical and unexplained:
        notes.append(f"{unexplained} text(s) differ beyond near-ties; forerun verify tells what that is")
    return notes
