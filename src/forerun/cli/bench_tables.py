"""The figures of `forerun bench`, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from forerun.cli.streaming import speculation_rows

if TYPE_CHECKING:
    from forerun.bench.curve import Curve
    from forerun.bench.drafting import DraftingCost
    from forerun.bench.latency import LatencyResult
    from forerun.bench.throughput import ThroughputResult
    from forerun.core.stats import SpeculationStats


def show_curve(curve: Curve, drafting: DraftingCost | None, console: Console) -> None:
    """What was measured with what, a table of passes, and the drafter's cost."""
    weights = "unknown" if curve.weight_bytes is None else decimal(curve.weight_bytes)
    console.print(f"{curve.machine}\n{curve.model}, {curve.dtype} on {curve.device}, kernels: {curve.kernels}")
    console.print(f"weights read per pass {weights}, memory {curve.gigabytes_per_second:.1f} GB/s")
    table = Table(title=f"whole forward pass, medians of {curve.repeats} interleaved rounds")
    for name in ("context", "sequences", "rows each", "ms", "T / T(1)", "of the bandwidth limit"):
        table.add_column(name, justify="right")
    for before, point in zip([None, *curve.points], curve.points, strict=False):
        if before is not None and before.context != point.context:
            table.add_section()
        table.add_row(
            str(point.context),
            str(point.num_sequences),
            str(point.rows),
            f"{point.milliseconds:.2f}",
            f"{point.ratio:.2f}",
            "-" if point.bandwidth_share is None else f"{point.bandwidth_share:.0%}",
        )
    console.print(table)
    if drafting is not None:
        console.print(_drafting_table(drafting))


def _drafting_table(cost: DraftingCost) -> Table:
    per_token, share = cost.milliseconds_per_draft_token, cost.draft_token_share
    rate, length = cost.acceptance_rate, cost.acceptance_length
    table = Table(
        title=f"{cost.speculative}: {cost.num_steps} steps over a text that repeats itself", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("drafted tokens", str(cost.num_draft_tokens))
    table.add_row("drafting, ms per drafted token", "-" if per_token is None else f"{per_token:.3f}")
    table.add_row("drafting, of T(1) per drafted token", "-" if share is None else f"{share:.1%}")
    table.add_row("drafting, ms per step", f"{cost.draft_milliseconds_per_step:.3f}")
    table.add_row("host without drafting, ms per step", f"{cost.host_milliseconds_per_step:.3f}")
    table.add_row("forward pass, ms per step", f"{cost.forward_milliseconds_per_step:.2f}")
    table.add_row("acceptance rate (accepted / drafted)", "-" if rate is None else f"{rate:.1%}")
    table.add_row("acceptance length (tokens per step)", "-" if length is None else f"{length:.2f}")
    return table


def show_latency(result: LatencyResult, console: Console) -> None:
    """Average and percentiles, in vLLM's words."""
    console.print(f"Avg latency: {result.avg_latency} seconds")
    for percent, seconds in result.percentiles.items():
        console.print(f"{percent}% percentile latency: {seconds} seconds")
    _show_speculation(result.speculation, console)


def show_throughput(result: ThroughputResult, console: Console) -> None:
    """Requests and tokens per second, in vLLM's words."""
    console.print(
        f"Throughput: {result.requests_per_second:.2f} requests/s, {result.tokens_per_second:.2f} total tokens/s, "
        f"{result.output_tokens_per_second:.2f} output tokens/s"
    )
    console.print(f"Total num prompt tokens:  {result.num_prompt_tokens}")
    console.print(f"Total num output tokens:  {result.num_output_tokens}")
    _show_speculation(result.speculation, console)


def _show_speculation(stats: SpeculationStats, console: Console) -> None:
    """How drafting went, if there were drafts."""
    if stats.num_drafts:
        for name, value in speculation_rows(stats):
            console.print(f"{name}: {value}")
