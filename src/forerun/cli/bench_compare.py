"""`forerun bench compare`: ways to draft against plain decoding, on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from forerun.bench.workloads import ComparisonWorkload
from forerun.cli import compare_tables, loading
from forerun.cli.bench_report import REPORT, WORKLOAD, ReportOptions, status
from forerun.cli.options import EngineOptions
from forerun.cli.pictures import check_picture
from forerun.cli.prompt_files import Prompt, read_kinds
from forerun.cli.streaming import speculation_json
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.comparison import Comparison

ENGINE, COMPARISON = EngineOptions(), ComparisonWorkload()


def compare(
    model: str,
    *,
    configs: Path,
    prompts: Annotated[list[Path] | None, Parameter(consume_multiple=True, negative=())] = None,
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
    from forerun.bench.prompts import WORKLOADS
    from forerun.bench.requests import lay_out
    from forerun.cli.config_files import read_configs
    from forerun.config.settings import EngineSettings
    from forerun.proof.greedy import is_near_tie

    check_picture("--picture", picture)
    _refuse_speculation(engine)
    named = read_configs(configs)
    kinds: Mapping[str, Sequence[Prompt]] = WORKLOADS if prompts is None else read_kinds(prompts)
    settings = EngineSettings.from_keywords(model, engine.plain_settings())
    check_batch_size(settings, workload)
    target = loading.load_target(settings)
    if target.tokenizer is None:
        raise ConfigError(f"prompts: {model} has no tokenizer to read them with; give a folder that holds one")
    token_ids = {kind: [lay_out(target.tokenizer, text) for text in texts] for kind, texts in kinds.items()}
    with status() as progress:
        found = measure_comparison(target, settings, named, token_ids, workload, judge=is_near_tie, progress=progress)
    report.write(as_json(found))
    if picture is not None:
        from forerun.bench.picture import draw  # matplotlib: only when it is needed

        draw(found, picture)
    if not report.json_output:
        compare_tables.show(found, Console(highlight=False))


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison for machines."""
    outcomes = [
        {**outcome.to_json(), "speculation": speculation_json(outcome.speculation)} for outcome in found.outcomes
    ]
    return {**found.to_json(), "outcomes": outcomes}


def _refuse_speculation(engine: EngineOptions) -> None:
    if engine.speculates:
        raise ConfigError(
            "--speculative-config: bench compare takes its configurations from --configs; write this one there"
        )
    if engine.kv_transfer_config is not None:
        raise ConfigError("--kv-transfer-config: bench compare saves no hidden states; leave it out")
