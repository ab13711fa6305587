"""`forerun bench replay`: drafters judged on recorded texts of a target, without the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter, Token
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli import loading
from forerun.cli.console import plain_console, status
from forerun.cli.input_files import Prompt, read_configs, read_kinds
from forerun.cli.interruption import resumable
from forerun.cli.options import REPORT, EngineOptions, Paths, ReportOptions
from forerun.cli.speculation_figures import speculation_json
from forerun.core.writable import check_writable_file
from forerun.errors import ConfigError, ModelError
from forerun.models import store

if TYPE_CHECKING:
    from forerun.bench.pass_costs import PassCosts
    from forerun.bench.recording import Recording
    from forerun.bench.replay import ReplayOutcome

ENGINE = EngineOptions()


def parse_temperatures(_hint: type[Any], tokens: Sequence[Token]) -> tuple[float, ...]:
    """Read temperatures with commas between them.

    Raises:
        ValueError: one of them is no number of 0 or more.
    """
    text = tokens[0].value
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= value < float("inf") for value in found):
        raise ValueError(f"got {text!r}; must be numbers of 0 or more with commas between them, e.g. 0,1")
    return tuple(dict.fromkeys(found))


Temperatures = Annotated[tuple[float, ...] | None, Parameter(converter=parse_temperatures, n_tokens=1, negative=())]

MAX_TOKENS, TEMPERATURES = 256, (0.0, 1.0)
"""What is recorded where the options do not say."""


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """What to record, where there is no recording yet; None: as by default."""

    model: str | None = None
    """A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name."""
    prompts: Paths = None
    """Files, each a kind of prompts, as in "forerun bench compare"; by default built-in ones."""
    max_tokens: int | None = None
    """Tokens of each text, at most; by default 256."""
    temperatures: Temperatures = None
    """Each prompt is answered once at each of these; by default 0,1."""

    @property
    def kinds(self) -> dict[str, list[Prompt]]:
        """The prompts of each kind.

        Raises:
            ConfigError: a file cannot be read.
        """
        from forerun.bench.prompts import WORKLOADS

        if self.prompts is not None:
            return read_kinds(self.prompts)
        return {kind: [*texts] for kind, texts in WORKLOADS.items()}


RECORDING = RecordingOptions()


def replay(
    texts: Path,
    /,
    *,
    configs: Path,
    costs: str = "flat",
    recording: Annotated[RecordingOptions, Parameter(name="*", group=Group("Recording", sort_key=1))] = RECORDING,
    report: ReportOptions = REPORT,
    engine: EngineOptions = ENGINE,
) -> None:
    """Judge drafters that need no model on recorded texts of a target, in seconds.

    Which drafted tokens stand depends on the text alone. So the target writes each text once, with its
    likeliest tokens at each place, and any number of rules are judged on them. After Ctrl-C the same command
    goes on with the recording.

    Args:
        texts: The recording, .jsonl or .jsonl.gz; if there is none yet, --model writes it first.
        configs: A YAML or JSON file: names with a speculative_config each, or a list of these.
        costs: What a verified row costs: a file of "forerun bench curve --output-json", "flat" (3 to 10 % of
            a pass, as on the native kernels) or "steep" (25 %, as in torch on a CPU).
    """
    from forerun.bench.recording import read_recording  # torch: only when it is needed
    from forerun.bench.replay import judge_recording

    if engine.seed != ENGINE.seed:
        raise ConfigError("--seed: each text has the number of its prompt as its seed; leave it out")
    named, pass_costs = read_configs(configs), _read_costs(costs)
    if texts.exists():
        found = read_recording(texts)
        _refuse_other_texts(texts, found, recording, engine)
    else:
        _record(texts, recording, engine)
        found = read_recording(texts)
    with status() as progress:
        outcomes = judge_recording(found, named, pass_costs, progress=progress)
    if not outcomes:
        raise ConfigError(
            f"replay: {texts} has no text of two tokens or more, so that nothing can be drafted; record others"
        )
    report.write(
        {
            "model": found.info.model,
            "costs": asdict(pass_costs),
            "configs": named,
            "outcomes": [{**one.to_json(), "speculation": speculation_json(one.speculation)} for one in outcomes],
        },
        show=lambda: _show(found, outcomes, plain_console()),
    )


def _read_costs(costs: str) -> PassCosts:
    from forerun.bench.pass_costs import FLAT, STEEP, read_costs

    return {"flat": FLAT, "steep": STEEP}.get(costs) or read_costs(Path(costs))


def _record(path: Path, options: RecordingOptions, engine: EngineOptions) -> None:
    """Let the model write the texts.

    Raises:
        ConfigError: no model is named, or the file cannot be written.
    """
    from forerun.bench.prompts import encode_prompt
    from forerun.bench.recording import record, write_recording

    if options.model is None:
        raise ConfigError(f"replay: there is no file {path}; give a recording, or --model to record one there")
    check_writable_file("replay", path)
    kinds = options.kinds
    llm = loading.load_llm(options.model, engine.without_pools())
    tokenizer = llm.get_tokenizer()
    token_ids = {kind: [encode_prompt(tokenizer, text) for text in texts] for kind, texts in kinds.items()}
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    with resumable(unfinished.exists), status() as progress:
        found = record(
            llm,
            token_ids,
            max_tokens=MAX_TOKENS if options.max_tokens is None else options.max_tokens,
            temperatures=options.temperatures or TEMPERATURES,
            unfinished=unfinished,
            progress=progress,
        )
    write_recording(found, path)
    unfinished.unlink(missing_ok=True)


def _refuse_other_texts(path: Path, found: Recording, options: RecordingOptions, engine: EngineOptions) -> None:
    """Refuse to judge a recording that is not of the texts that the options ask for.

    With --model, which would record, what is left out is asked for as by default.

    Raises:
        ConfigError: it is of another model, other weights, prompts, lengths or temperatures, or other number formats.
    """
    from forerun.config.settings import DTYPES

    temperatures = tuple(dict.fromkeys(text.temperature for text in found.texts))
    activations = found.info.rounded("activations") or "bfloat16"
    recorded: dict[str, object] = {
        "--model": found.info.model,
        "--dtype": found.info.dtype,
        "--quantization": found.info.rounded("weights"),
        "--activation-dtype": activations,
        "--load-format": found.info.load_format,
        "--prompts": {kind: len(of_kind) for kind, of_kind in found.prompts.items()},
        "--max-tokens": found.info.max_tokens,
        "--temperatures": temperatures,
    }
    kinds = options.kinds
    prompts = {kind: len(of_kind) for kind, of_kind in kinds.items()}
    asked: dict[str, object] = {
        "--model": options.model,
        "--dtype": None
        if engine.dtype == "auto"
        else str(DTYPES.get(engine.dtype, engine.dtype)).removeprefix("torch."),
        "--quantization": engine.quantization,
        "--activation-dtype": None if engine.activation_dtype == "auto" else engine.activation_dtype,
        "--load-format": None if engine.load_format == "auto" else engine.load_format,
        "--prompts": None if options.prompts is None else prompts,
        "--max-tokens": options.max_tokens,
        "--temperatures": options.temperatures,
    }
    usual: dict[str, object] = {
        "--quantization": None,
        "--activation-dtype": "auto" if activations == "int8" else activations,  # auto is either of the others
        "--load-format": "auto",
        "--prompts": prompts,
        "--max-tokens": MAX_TOKENS,
        "--temperatures": TEMPERATURES,
    }
    for option, had in recorded.items():
        wanted = asked[option]
        if wanted not in (None, had):
            raise ConfigError(
                f"{option}: got {wanted}; {path} is there already and was recorded with {had}; leave the options of recording out, "
                "or give another file to record"
            )
        if wanted is None and options.model is not None and usual.get(option, had) != had:
            raise ConfigError(
                f"{option}: by default {usual[option]}; {path} is there already and was recorded with {had}; say so with {option}, "
                "leave out --model to take the file as it is, or give another file to record"
            )
    if options.model is not None or options.prompts is not None:
        _refuse_other_prompts(path, found, kinds)


def _refuse_other_prompts(path: Path, found: Recording, kinds: Mapping[str, Sequence[Prompt]]) -> None:
    """Refuse a recording whose prompts, as its model reads them, are not these; there are as many of each kind.

    Raises:
        ConfigError: one is another, or the model that would read them cannot be found.
    """
    from forerun.bench.prompts import encode_prompt
    from forerun.models.tokenizer import load_tokenizer

    loading.pull_if_needed(found.info.model)
    try:
        tokenizer = load_tokenizer(store.resolve_model(found.info.model))
    except ModelError as error:
        raise ConfigError(
            f"--prompts: nobody can tell whether {path} was recorded with them ({error}); leave --prompts and --model out to "
            "take the file as it is"
        ) from None
    for kind, recorded in found.prompts.items():
        for number, (prompt, ids) in enumerate(zip(kinds[kind], recorded, strict=True), 1):
            if encode_prompt(tokenizer, prompt) != ids:
                raise ConfigError(
                    f"--prompts: got {prompt!r:.80} as number {number} of {kind!r}; {path} is there already and was recorded with "
                    "another one; leave the options of recording out, or give another file to record"
                )


def _show(recording: Recording, outcomes: Sequence[ReplayOutcome], console: Console) -> None:
    """Print one table, grouped by the kind of texts, and what went wrong."""
    table = Table(title=f"{len(recording.texts)} texts of {recording.info.model}, replayed; speed-ups at assumed costs")
    table.add_column("")
    for name in ("tokens/step", "rows/step", "speed-up", "median", "worst", "µs/step"):
        table.add_column(name, justify="right")
    for before, one in zip([None, *outcomes], outcomes, strict=False):
        if before is None or before.kind != one.kind:
            table.add_section()
            table.add_row(Text(f"{one.kind} ({one.num_texts})", style="bold"))
        table.add_row(
            f"  {one.name}",
            f"{one.tokens_per_step:.2f}",
            f"{one.rows_per_step:.2f}",
            f"{one.speed_up:.2f}",
            f"{one.median_speed_up:.2f}",
            f"{one.worst_speed_up:.2f}",
            f"{one.drafting_microseconds:.0f}",
        )
    console.print(table)
    for one in outcomes:
        if one.num_failed_drafts:
            console.print(
                f"{one.name}, {one.kind}: the drafter failed {one.num_failed_drafts} time(s), see the warning above"
            )
