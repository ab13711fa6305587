"""Summarises results: the figures of a run, and ratios between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

Result = dict[str, Any]

GIB = 1 << 30


def run_lines(result: Result) -> list[str]:
    """The lines with the figures of one run."""
    energy = result["energy"]
    joules = energy["j_per_output_token"]
    lines = [
        f"📊 Benchmark Results: {result['method']} on {result['engine']}",
        f"  Total Requests:     {result['total_requests']}",
        f"  Total Batches:      {result['total_batches']}",
        f"  Total Duration:     {result['total_duration']:.2f} s",
        f"  Prompt Tokens:      {result['total_prompt_tokens']:,}",
        f"  Generated Tokens:   {result['total_tokens']:,}",
        f"  Overall Throughput: {result['overall_throughput']:.2f} tokens/s",
        f"  Average TTFT:       {1e3 * result['avg_ttft']:.2f} ms",
        f"  Average Latency:    {1e3 * result['avg_latency']:.2f} ms",
        f"  Peak Memory:        {memory_of(result) / GIB:.2f} GiB",
        f"  Energy:             {'none: ' + str(energy['reason']) if joules is None else f'{joules:.3f} J/token'}",
    ]
    if result["avg_acceptance_rate"] is not None:
        lines.append(f"  Average Acceptance Rate: {result['avg_acceptance_rate']:.3f}")
    if result["effective_method"] != result["method"]:
        lines.append(f"⚠️  Not {result['method']}: this is {result['effective_method']} ({result['fallback_reason']})")
    return lines


def memory_of(result: Result) -> int:
    """Peak bytes on the GPUs, or without any the peak resident bytes of the process."""
    memory = result["memory"]
    return int(memory["peak_gpu_bytes"] or memory["peak_rss_bytes"])


def compare(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Ratios of each run to the baseline: transformers' speculative decoding, or else the first run."""
    baseline = next((one for one in results if (one["engine"], one["method"]) == ("transformers", "speculative")), None)
    baseline = baseline or results[0]
    return [_ratios(one, baseline, _plain_of(one, results)) for one in results]


def _plain_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The same engine's plain decoding."""
    return next(
        (one for one in results if one["engine"] == result["engine"] and one["effective_method"] == "target_ar"), None
    )


def _ratios(result: Result, baseline: Result, plain: Result | None) -> dict[str, Any]:
    def ratio(value: Callable[[Result], float | None], other: Result | None) -> float | None:
        mine, its = value(result), value(other) if other else None
        return mine / its if mine is not None and its else None

    return {
        "engine": result["engine"],
        "method": result["method"],
        "effective_method": result["effective_method"],
        "baseline": f"{baseline['method']} on {baseline['engine']}",
        "throughput_ratio": ratio(lambda one: one["busy_throughput"], baseline),
        "latency_ratio": ratio(lambda one: one["avg_latency"], baseline),
        "ttft_ratio": ratio(lambda one: one["avg_ttft"], baseline),
        "memory_ratio": ratio(memory_of, baseline),
        "energy_ratio": ratio(lambda one: one["energy"]["j_per_output_token"], baseline),
        "throughput_ratio_to_own_target_ar": ratio(lambda one: one["busy_throughput"], plain),
    }


def comparison_table(results: Sequence[Result], comparison: Sequence[dict[str, Any]]) -> Table:
    """A table with a column per run and each ratio below its figure."""
    table = Table(
        title=f"Compared with {comparison[0]['baseline']}",
        caption="x: ratio to that; own x: tokens/s to the engine's own plain decoding; times are averages",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for result in results:
        fell_back = result["effective_method"] != result["method"]
        method = "fell back!" if fell_back else result["method"]
        table.add_column(f"{result['engine']}\n{method}", justify="right", no_wrap=True)
    rows: list[tuple[str, list[float | None], str]] = [
        ("tokens/s", [one["busy_throughput"] for one in results], "{:.1f}"),
        ("  x", [one["throughput_ratio"] for one in comparison], "{:.2f}x"),
        ("  own x", [one["throughput_ratio_to_own_target_ar"] for one in comparison], "{:.2f}x"),
        ("TTFT ms", [1e3 * one["avg_ttft"] for one in results], "{:.0f}"),
        ("  x", [one["ttft_ratio"] for one in comparison], "{:.2f}x"),
        ("latency ms", [1e3 * one["avg_latency"] for one in results], "{:.0f}"),
        ("  x", [one["latency_ratio"] for one in comparison], "{:.2f}x"),
        ("memory GiB", [memory_of(one) / GIB for one in results], "{:.2f}"),
        ("  x", [one["memory_ratio"] for one in comparison], "{:.2f}x"),
        ("J/token", [one["energy"]["j_per_output_token"] for one in results], "{:.3f}"),
        ("  x", [one["energy_ratio"] for one in comparison], "{:.2f}x"),
    ]
    for name, values, form in rows:
        table.add_row(name, *("–" if value is None else form.format(value) for value in values))
    return table
