"""What stands below the runs: each one's figures, and all of them beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

Result = dict[str, Any]

GIB = 1 << 30


def run_lines(result: Result) -> list[str]:
    """The figures of one run."""
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
    """Bytes on the GPUs where there are some, else resident ones of the process."""
    memory = result["memory"]
    return int(memory["peak_gpu_bytes"] or memory["peak_rss_bytes"])


def compare(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each run beside the baseline: transformers' speculative decoding if it was run, else the first."""
    baseline = next((one for one in results if (one["engine"], one["method"]) == ("transformers", "speculative")), None)
    baseline = baseline or results[0]
    return [_beside(one, baseline, _plain_of(one, results)) for one in results]


def _plain_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The same engine's plain decoding."""
    return next(
        (one for one in results if one["engine"] == result["engine"] and one["effective_method"] == "target_ar"), None
    )


def _beside(result: Result, baseline: Result, plain: Result | None) -> dict[str, Any]:
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
    """One row per run; each ratio stands after what it is of."""
    table = Table(
        title=f"Compared with {comparison[0]['baseline']}",
        caption="x: ratio to that; own x: tokens/s to the engine's own plain decoding; "
        "TTFT, latency: averages in ms; GiB: peak memory",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("engine", "method", "tok/s", "x", "own x", "TTFT", "latency", "x", "GiB", "x", "J/tok"):
        table.add_column(column, justify="left" if column in ("engine", "method") else "right", no_wrap=True)
    for result, beside in zip(results, comparison, strict=True):
        fell_back = result["effective_method"] != result["method"]
        table.add_row(
            result["engine"],
            "fell back!" if fell_back else result["method"],
            f"{result['busy_throughput']:.1f}",
            _shown(beside["throughput_ratio"]),
            _shown(beside["throughput_ratio_to_own_target_ar"]),
            f"{1e3 * result['avg_ttft']:.0f}",
            f"{1e3 * result['avg_latency']:.0f}",
            _shown(beside["latency_ratio"]),
            f"{memory_of(result) / GIB:.2f}",
            _shown(beside["memory_ratio"]),
            _shown(result["energy"]["j_per_output_token"]),
        )
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
