"""`forerun bench serve`: loads an OpenAI-compatible server and measures its answers, as `vllm bench serve` does."""

from __future__ import annotations

import asyncio
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from forerun.bench.energy import Energy, EnergyMeter
from forerun.bench.load.answer import METRICS
from forerun.bench.load.workload import Dataset, Traffic
from forerun.cli import loading
from forerun.cli.bench_serve_options import BodyOptions, FigureOptions, ResultOptions, ServerOptions
from forerun.cli.console import spinner
from forerun.cli.options import REPORT, ReportOptions
from forerun.errors import ConfigError, ModelError
from forerun.models import store

if TYPE_CHECKING:
    from forerun.bench.load.measure import Load
    from forerun.bench.load.report import Report
    from forerun.bench.load.server import DraftCounts, ServedModel
    from forerun.core.load_figures import Figures, Spread
    from forerun.models.tokenizer import Tokenizer

FAILED = 1
SERVER, BODY, FIGURES, RESULT = ServerOptions(), BodyOptions(), FigureOptions(), ResultOptions()
DATASET, TRAFFIC = Dataset(), Traffic()

WIDTH, LABEL_WIDTH = 50, 40  # as in `vllm bench serve`
MAX_ERRORS = 10


def serve(
    *,
    server: ServerOptions = SERVER,
    dataset: Annotated[Dataset, Parameter(name="*", group=Group("Prompts", sort_key=2), negative=())] = DATASET,
    traffic: Annotated[Traffic, Parameter(name="*", group=Group("Traffic", sort_key=3), negative=())] = TRAFFIC,
    body: BodyOptions = BODY,
    figures: FigureOptions = FIGURES,
    result: ResultOptions = RESULT,
    report: ReportOptions = REPORT,
) -> int:
    """Send requests to an OpenAI-compatible server, as "vllm bench serve" does, and measure its answers.

    Shows throughput, latencies, acceptance by the server's own counters, and energy; after Ctrl-C of what was
    answered by then.
    """
    if find_spec("aiohttp") is None:
        raise ConfigError("bench serve: aiohttp is not installed; pip install 'forerun[bench]'")
    from forerun.bench.load.measure import find_model  # aiohttp, which is an extra

    model = asyncio.run(find_model(server.url, server.headers, model=server.model, wait=server.ready_check_timeout_sec))
    tokenizer = _TokenizerOnDemand(server.tokenizer or model.root)
    load = _make_load(server, model, dataset, traffic, body, tokenizer)
    found = _measure(load, server, figures, result, tokenizer)
    document = found.to_json(detailed=result.save_detailed)
    try:
        _warn(found)
        report.write(document, show=lambda: print(_render(found)))
    finally:  # whatever becomes of the output and of the file there
        if result.saves:
            from forerun.bench.load.report import save

            save(document, result.path(found.file_name), append=result.append_result)
    if result.plot is not None:
        from forerun.bench.picture import draw_load  # matplotlib: only when it is needed

        draw_load(found.measurement.run.answers, f"{model.name} at {server.url}", result.plot)
    if found.measurement.run.is_interrupted:
        raise KeyboardInterrupt
    return 0 if found.figures.completed else FAILED


class _TokenizerOnDemand:
    """Loads a tokenizer at its first use, since many runs need none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: Tokenizer | None = None

    def get(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ForerunError: the tokenizer cannot be loaded; the message names the option for another one.
        """
        if self._loaded is None:
            from forerun.models.tokenizer import load_tokenizer  # only when it is needed

            loading.pull_if_needed(self.name)
            try:
                with spinner(f"Loading the tokenizer of {self.name}"):
                    self._loaded = load_tokenizer(store.resolve_model(self.name))
            except ModelError as error:
                raise ModelError(f"{error}; or name another by --tokenizer") from error
        return self._loaded

    def encode(self) -> Callable[[str], list[int]]:
        """A function that encodes an answer's text."""
        tokenizer = self.get()
        return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _make_load(
    server: ServerOptions,
    model: ServedModel,
    dataset: Dataset,
    traffic: Traffic,
    body: BodyOptions,
    tokenizer: _TokenizerOnDemand,
) -> Load:
    """Draw the requests; warm-ups have prompts of their own unless the file has too few."""
    from forerun.bench.load.client import Endpoint
    from forerun.bench.load.measure import Load
    from forerun.bench.load.requests import draw_requests

    chat = server.backend == "openai-chat"
    needed = tokenizer.get() if dataset.needs_tokenizer(chat=chat) else None
    drawn = draw_requests(dataset, needed, dataset.num_prompts + traffic.num_warmups)
    requests, spare = drawn[: dataset.num_prompts], drawn[dataset.num_prompts :]
    return Load(
        base_url=server.url,
        model_id=model.root,
        endpoint=Endpoint(
            url=server.url + server.path,
            backend=server.backend,
            model=server.served_model_name or model.name,
            body=body.body(server.backend, ignore_eos=dataset.dataset_name == "random"),
            headers=server.headers,
        ),
        requests=requests,
        warmups=list(islice(cycle([*spare, *requests]), traffic.num_warmups)),
        traffic=traffic,
        seed=dataset.seed,
        id_prefix=server.id_prefix,
    )


def _measure(
    load: Load, server: ServerOptions, figures: FigureOptions, result: ResultOptions, tokenizer: _TokenizerOnDemand
) -> Report:
    """Run the load and compute its figures."""
    from forerun.bench.load.figures import sum_up
    from forerun.bench.load.measure import count_tokens, measure
    from forerun.bench.load.report import Report

    if server.is_local:
        meter = EnergyMeter.of_this_machine(figures.powercap_root)
    else:
        meter = EnergyMeter([], f"the server at {server.url} is not known to run on this machine")
    meter.rest(figures.energy_idle_seconds)

    @contextmanager
    def bar() -> Iterator[Callable[[], object]]:
        from tqdm import tqdm

        total = None if load.traffic.duration is not None else len(load.requests)
        with tqdm(total=total, unit="req", disable=figures.disable_tqdm or not sys.stderr.isatty()) as shown:
            yield lambda: shown.update(1)

    found = asyncio.run(measure(load, meter, bar))
    count_tokens(found.run, tokenizer.encode)
    return Report(
        load=load,
        measurement=found,
        figures=sum_up(
            found.run.answers,
            found.run.seconds,
            metrics=figures.metrics,
            percents=figures.percents,
            goals=figures.goals,
        ),
        tokenizer=tokenizer.name,
        label=result.label,
        metadata=result.pairs,
    )


def _warn(found: Report) -> None:
    """Print to standard error what went wrong."""
    run = found.measurement.run
    if run.is_interrupted:
        print(
            f"interrupted: the figures are of {len(run.answers)} requests that had ended; {run.num_unfinished} more had been sent",
            file=sys.stderr,
        )
    for line in _errors(found):
        print(f"warning: {line}", file=sys.stderr)


def _render(report: Report) -> str:
    """The result in the 50 columns of `vllm bench serve`."""
    found, figures = report.measurement, report.figures
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_summary(report)]
    for name, spread in figures.spreads.items():
        lines += _latency(name, spread)
    if found.drafts is not None:
        lines += _drafts(found.drafts)
    lines += [*_energy(found.energy, figures), "=" * WIDTH]
    return "\n".join(lines)


def _errors(report: Report) -> list[str]:
    """The distinct errors of requests with their counts, ten at most."""
    counts: dict[str, int] = {}
    for answer in report.measurement.run.answers:
        if answer.error is not None:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return [f"{count} failed: {error}" for error, count in list(counts.items())[:MAX_ERRORS]]


def _summary(report: Report) -> Iterator[str]:
    figures, traffic, run = report.figures, report.load.traffic, report.measurement.run
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
    if run.is_interrupted:
        yield _line("Unfinished requests (interrupted):", run.num_unfinished)
    if run.num_unsent:
        yield _line("Unsent requests:", run.num_unsent)
    if traffic.max_concurrency is not None:
        yield _line("Maximum request concurrency:", traffic.max_concurrency)
    if not math.isinf(traffic.request_rate):
        yield _line("Request rate configured (RPS):", traffic.request_rate)
    yield _line("Benchmark duration (s):", figures.seconds)
    yield _line("Total input tokens:", figures.total_input)
    yield _line("Total generated tokens:", figures.total_output)
    yield _line("Request throughput (req/s):", figures.request_throughput)
    if figures.request_goodput is not None:
        yield _line("Request goodput (req/s):", figures.request_goodput)
    yield _line("Output token throughput (tok/s):", figures.output_throughput)
    yield _line("Peak output token throughput (tok/s):", figures.peaks.num_chunks)
    yield _line("Peak weighted by tokens (tok/s):", figures.peaks.num_tokens)
    yield _line("Peak concurrent requests:", float(figures.peaks.num_requests))
    yield _line("Total token throughput (tok/s):", figures.total_token_throughput)


def _latency(name: str, spread: Spread) -> Iterator[str]:
    metric = METRICS[name]
    yield _title(metric.title)
    yield _line(f"Mean {metric.short} (ms):", spread.mean)
    yield _line(f"Median {metric.short} (ms):", spread.median)
    for percent, value in spread.percentiles.items():
        yield _line(f"P{percent:g} {metric.short} (ms):", value)


def _drafts(drafts: DraftCounts) -> Iterator[str]:
    yield _title("Speculative Decoding")
    yield _line("Acceptance rate (%):", None if drafts.acceptance_rate is None else 100 * drafts.acceptance_rate)
    yield _line("Acceptance length:", drafts.acceptance_length)
    yield _line("Drafts:", drafts.num_drafts)
    yield _line("Draft tokens:", drafts.num_draft_tokens)
    yield _line("Accepted tokens:", drafts.num_accepted_tokens)
    if drafts.accepted_per_position:
        yield "Per-position acceptance (%):"
    for position, share in enumerate(drafts.acceptance_per_position):
        yield _line(f"  Position {position}:", 100 * share)


def _energy(energy: Energy, figures: Figures) -> Iterator[str]:
    yield _title("Energy")
    if energy.joules is None:
        yield from textwrap.wrap(f"Not measured: {energy.reason}", WIDTH)
        return
    for part, joules in energy.parts.items():
        yield _line(f"{part.upper()} energy (J):", joules)
    yield _line("Idle power (W):", energy.idle_w)
    yield _line("Energy net of idle (J):", energy.net_joules)
    if figures.total_output:
        yield _line("Energy per output token (J):", energy.joules / figures.total_output)
    if energy.reason is not None:
        yield from textwrap.wrap(f"Not measured: {energy.reason}", WIDTH)


def _title(text: str) -> str:
    return f"{text:-^{WIDTH}}"


def _line(label: str, value: float | None) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{LABEL_WIDTH}} {shown:<10}"
