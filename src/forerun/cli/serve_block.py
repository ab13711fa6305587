"""The result of `forerun bench serve` for people, in the 50 columns of `vllm bench serve`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from forerun.bench.energy import Energy
from forerun.bench.load.figures import Figures, Spread
from forerun.bench.load.latencies import METRICS
from forerun.bench.load.report import Report
from forerun.bench.load.scrape import DraftCounts

WIDTH, LABEL = 50, 40
MOST_ERRORS = 10


def render(report: Report) -> str:
    """The whole block."""
    found, figures = report.measurement, report.figures
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_summary(report)]
    for name, spread in figures.spreads.items():
        lines += _latency(name, spread)
    if found.drafts is not None:
        lines += _drafts(found.drafts)
    lines += [*_energy(found.energy, figures), "=" * WIDTH]
    return "\n".join(lines)


def errors(report: Report) -> list[str]:
    """What went wrong, each once with how often; no more than ten."""
    counts: dict[str, int] = {}
    for answer in report.measurement.run.answers:
        if answer.error is not None:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return [f"{count} failed: {error}" for error, count in list(counts.items())[:MOST_ERRORS]]


def _summary(report: Report) -> Iterator[str]:
    figures, traffic, run = report.figures, report.load.traffic, report.measurement.run
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
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
    return f"{label:<{LABEL}} {shown:<10}"
