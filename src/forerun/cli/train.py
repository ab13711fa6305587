"""`forerun train`: makes a drafter for a model, from nothing but the model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.console import plain_console
from forerun.cli.interruption import resumable
from forerun.cli.options import Duration, Flag, JsonFlag
from forerun.train.torch_environment import set_torch_environment

if TYPE_CHECKING:
    from forerun.train.estimates import Estimate
    from forerun.train.measuring import Measurement
    from forerun.train.run import Report, StageReport


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What a run is made of; the fields of `RunSettings` besides the model and the folder."""

    method: str = "eagle3"
    """The kind of head: eagle3."""
    prompts: Path | None = None
    """Prompts that the model answers, a .jsonl or .txt file; by default it invents the user's part too."""
    magpie: int | None = None
    """Conversations to invent; by default as many as there is time for."""
    texts: Annotated[tuple[Path, ...], Parameter(negative=())] = ()
    """The --output folders of other runs for this model, whose texts are trained on instead of new ones."""
    from_pool: Path | None = None
    """A --pools-folder of a server, or a file of "forerun pools export": trained on its past answers instead of new texts."""
    begin_with: Path | None = None
    """A head of this command for this model, which is trained further on new texts; its draft vocabulary stays."""
    budget: Duration = None
    """Time that all may take, e.g. 3h or 90m."""
    epochs: float | None = None
    """Times that each text is trained on; by default as often as there is time for."""
    exclude: Annotated[tuple[Path, ...], Parameter(negative=())] = ()
    """Files of evaluation prompts: conversations that share eight words in a row with one are left out."""
    draft_vocab_size: int = 8192
    """Tokens that the head can draft, the most frequent ones of what the model wrote."""
    learning_rate: float = 3e-3
    """The highest learning rate."""
    batch_tokens: int = 2048
    """Tokens of a step, prompts included; more use a GPU better."""
    layout: str = "speculators"
    """How the head is stored: speculators (vLLM serves it) or specforge."""
    stored_as: str = "bf16"
    """The head's matrices: bf16, or int8 (compressed-tensors), half of the bytes."""
    verifier: str | None = None
    """What "vllm serve OUTPUT" loads as the model, a hub id or a folder; by default the hub id MODEL, else where MODEL lies here."""
    keep_features: Flag = False
    """Keep the model's hidden states of the texts on disk until the head is trained, so that they are computed only once."""
    device: str = "cpu"
    """Where all of it runs: cpu, cuda, or auto, which takes a GPU where there is one."""
    seed: int = 0
    """Seed of conversations, of the first weights and of the order of texts."""


TRAINING = TrainingOptions()


@command
def train(
    model: str,
    /,
    *,
    output: Path,
    dry_run: Flag = False,
    json_output: JsonFlag = False,
    training: TrainingOptions = TRAINING,
) -> None:
    """Train a head that drafts for a model, on texts that the model writes itself.

    Stages: write (the model has conversations), mask (what of them is learnt), train, measure (held-out conversations,
    drafted in the engine), package. Whatever interrupts it, the same command goes on where it was.

    Args:
        model: A folder, a known name (see "forerun models list") or a hub id org/name, of a chat model.
        output: Folder for the head; its subfolder "training" holds what is needed to go on.
        dry_run: Write and train for a minute, say what the run will take and give, and keep nothing.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun train smollm2-135m --output head --budget 3h --dry-run
        forerun train smollm2-135m --output head --budget 3h
        forerun train smollm2-135m --output head --magpie 20000 --epochs 3 --exclude mt_bench.jsonl
        forerun generate smollm2-135m "Hello" --speculative-config \\
            '{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}'
    """
    set_torch_environment()
    from forerun.train.run import TrainingRun  # torch: only when it is needed
    from forerun.train.run_settings import RunSettings

    options = {field.name: getattr(training, field.name) for field in fields(training)}
    settings = RunSettings(model=model, output=output, **options)
    loading.pull_if_needed(model)
    console = plain_console(stderr=True)
    with resumable(lambda: not dry_run), stage_bars(console) as report, tempfile.TemporaryDirectory() as scratch:
        run = TrainingRun(replace(settings, output=Path(scratch) / "head") if dry_run else settings, report)
        with run.folder.held():
            if dry_run or not run.is_estimated:
                estimate = run.estimate()
                _show_estimate(console, estimate)
            if dry_run:
                if json_output:
                    print(json.dumps(asdict(estimate)))
                return
            measured = run.go()
    if json_output:
        print(json.dumps({"head": str(output), **measured.to_json()}))
    else:
        _show(plain_console(), output, measured)


def _show_estimate(console: Console, estimate: Estimate) -> None:
    memory = "" if estimate.memory_bytes is None else f"; memory {decimal(estimate.memory_bytes)}"
    length = ""
    if estimate.length is not None:
        length = f"; acceptance length perhaps {estimate.length:.1f}, a guess (greedy, drafts of 3 tokens)"
    console.print(
        f"writing {estimate.num_written / 1e6:.2f}M tokens: {_hours(estimate.write_seconds)}; "
        f"training on {estimate.num_trained / 1e6:.2f}M: {_hours(estimate.train_seconds)}; "
        f"measuring: {_hours(estimate.measure_seconds)}; "
        f"disk {decimal(round(estimate.disk_bytes))}{memory}{length}",
        soft_wrap=True,
    )


def _show(console: Console, output: Path, measured: Measurement) -> None:
    for one in measured.at:
        shares = " ".join(f"{share:.0%}" for share in one.per_position)
        console.print(f"temperature {one.temperature:g}: acceptance length {one.length:.2f}, per position {shares}")
    if measured.speed_up is not None:
        cost = "" if measured.draft_ms is None else f"{measured.draft_ms:.2f} ms per drafted token, "
        console.print(f"{cost}{measured.speed_up:.2f} times as fast as without drafts")
    console.print(f"head: {output}", soft_wrap=True)  # a path is not broken in two


def _hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


@contextmanager
def stage_bars(console: Console) -> Iterator[Report]:
    """Show one bar per stage on stderr; where that is no terminal, a line every minute."""
    note = TextColumn("{task.fields[note]}", markup=False)  # it may name a folder
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TimeElapsedColumn(), note)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _BarPerStage(bars, console)


class _BarPerStage:
    """Draws the progress of a run; each stage has a bar, which stops when the next begins."""

    def __init__(self, bars: Progress, console: Console) -> None:
        self._bars, self._console = bars, console
        self._tasks: dict[str, TaskID] = {}
        self._said = 0.0

    def __call__(self, report: StageReport) -> None:
        if report.stage not in self._tasks:
            for task in self._tasks.values():
                self._bars.stop_task(task)
            self._tasks[report.stage] = self._bars.add_task(report.stage, total=report.total, note="")
            self._said = 0.0
        self._bars.update(self._tasks[report.stage], completed=report.done, total=report.total, note=report.note)
        now = self._bars.get_time()
        if not self._console.is_terminal and now - self._said > 60:
            share = f"{report.done / report.total:.0%} " if report.total else ""
            self._console.print(f"{report.stage} {share}{report.note}", soft_wrap=True, markup=False)
            self._said = now
