"""`forerun bench`: the speed of a model and configuration on this machine, or of a server."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from forerun.bench.workloads import LatencyWorkload, ThroughputWorkload
from forerun.cli import loading
from forerun.cli.bench_compare import compare
from forerun.cli.bench_replay import replay
from forerun.cli.bench_serve import serve
from forerun.cli.command import examples
from forerun.cli.console import plain_console, status
from forerun.cli.interruption import until_interrupted
from forerun.cli.options import REPORT, WORKLOAD, EngineOptions, ReportOptions
from forerun.cli.speculation_figures import speculation_json, speculation_rows
from forerun.cli.whole_numbers import Numbers

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.bench.curve import Curve, DraftingCost
    from forerun.bench.offline import LatencyResult, ThroughputResult
    from forerun.core.stats import SpeculationStats

bench = App(
    name="bench",
    help="Measure speed: of a forward pass by its rows, of one batch, of many requests, of ways to draft, of a server.",
    help_epilogue=examples(
        "  forerun bench curve smollm2-135m\n  forerun bench latency smollm2-135m --batch-size 1\n"
        "  forerun bench throughput smollm2-135m --num-prompts 32 --input-len 128 --output-len 64\n"
        "  forerun bench compare smollm2-135m --configs drafters.yaml\n"
        "  forerun bench replay texts.jsonl.gz --model smollm2-135m --configs drafters.yaml\n"
        "  forerun bench serve --num-prompts 64 --request-rate 4 --input-len 128 --output-len 64"
    ),
)
bench.command(compare)
bench.command(replay)
bench.command(serve)


ENGINE = EngineOptions()
LATENCY, THROUGHPUT = LatencyWorkload(), ThroughputWorkload()


@bench.command
def curve(
    model: str,
    *,
    rows: Numbers = (1, 2, 4, 6, 8, 12, 16, 32),
    contexts: Numbers = (256, 1024),
    sequences: Numbers = (8, 32),
    repeats: int = 15,
    report: ReportOptions = REPORT,
    engine: EngineOptions = ENGINE,
) -> None:
    """Time whole forward passes by their number of rows, against the memory's bandwidth.

    Drafts of n - 1 tokens cost T(n) / T(1) plain steps to verify. With a speculative option the
    drafter's own cost is measured too. The method auto begins with what was measured here.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        rows: Rows of one sequence in a pass; 1 is always measured.
        contexts: Tokens of each sequence that are in the KV cache already.
        sequences: Numbers of sequences of one row each in a pass.
        repeats: Rounds; each measures everything once, the bandwidth too, and medians are shown.
    """
    from forerun.bench.curve import (  # torch: only when it is needed
        check_counts,
        check_drafting,
        keep_costs,
        measure_curve,
        measure_drafting,
    )

    check_counts(rows=rows, contexts=contexts, sequences=sequences, repeats=[repeats])
    llm = loading.load_llm(model, engine.without_pools())
    if engine.names_drafter:
        check_drafting(llm)
    with status() as progress:
        measure = partial(measure_curve, llm, rows=rows, contexts=contexts, sequences=sequences, repeats=repeats)
        found, is_interrupted = until_interrupted(partial(measure, progress=progress))
        keep_costs(llm, found)
        drafting = None
        if engine.names_drafter and not is_interrupted:
            progress("drafting")
            try:
                drafting = measure_drafting(llm, found.one_row_milliseconds)
            except KeyboardInterrupt:
                print("interrupted: the drafter was not measured", file=sys.stderr)
                is_interrupted = True
    costs = {"drafting": None if drafting is None else drafting.to_json()}
    report.write(
        {**found.to_json(), **costs, "interrupted": is_interrupted},
        show=lambda: _show_curve(found, drafting, plain_console()),
    )
    if is_interrupted:
        raise KeyboardInterrupt


@bench.command
def latency(
    model: str,
    *,
    workload: Annotated[LatencyWorkload, WORKLOAD] = LATENCY,
    report: ReportOptions = REPORT,
    engine: EngineOptions = ENGINE,
) -> None:
    """Time one batch of requests from start to end, as "vllm bench latency" does.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
    """
    from forerun.bench.offline import measure_latency  # torch: only when it is needed

    llm = loading.load_llm(model, engine.without_pools())
    with status() as progress:
        result, is_interrupted = until_interrupted(partial(measure_latency, llm, workload, progress=progress))
    report.write(
        {**result.to_json(), **_circumstances(llm, result.speculation), "interrupted": is_interrupted},
        show=lambda: _show_latency(result, plain_console()),
    )
    if is_interrupted:
        raise KeyboardInterrupt


@bench.command
def throughput(
    model: str,
    *,
    workload: Annotated[ThroughputWorkload, WORKLOAD] = THROUGHPUT,
    report: ReportOptions = REPORT,
    engine: EngineOptions = ENGINE,
) -> None:
    """Count requests and tokens per second with all requests given at once, as "vllm bench throughput" does.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
    """
    from forerun.bench.offline import make_requests, measure_throughput  # torch: only when it is needed
    from forerun.bench.sharegpt import read_conversations

    exchanges = [] if workload.dataset_path is None else read_conversations(workload.dataset_path)
    llm = loading.load_llm(model, engine.without_pools())
    requests = make_requests(llm, workload, exchanges)
    measure = partial(measure_throughput, llm, workload, requests, use_tqdm=sys.stderr.isatty())
    result, is_interrupted = until_interrupted(measure)
    report.write(
        {**result.to_json(), **_circumstances(llm, result.speculation), "interrupted": is_interrupted},
        show=lambda: _show_throughput(result, plain_console()),
    )
    if is_interrupted:
        raise KeyboardInterrupt


def _circumstances(llm: LLM, speculation: SpeculationStats) -> dict[str, Any]:
    """The model, machine and configuration of a measurement, and its counts of drafts."""
    from forerun.bench.machine import describe_kernels, describe_machine

    return {
        "model": llm.settings.model,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(llm.device),
        "kernels": describe_kernels(llm),
        "machine": describe_machine(llm.device),
        "speculative": llm.speculative.describe(),
        "speculation": speculation_json(speculation),
    }


def _show_curve(curve: Curve, drafting: DraftingCost | None, console: Console) -> None:
    """Print the circumstances, a table of passes, and the drafter's cost."""
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


def _show_latency(result: LatencyResult, console: Console) -> None:
    """Print average and percentiles in vLLM's format."""
    console.print(f"Avg latency: {result.avg_latency} seconds")
    for percent, seconds in result.percentiles.items():
        console.print(f"{percent}% percentile latency: {seconds} seconds")
    _show_speculation(result.speculation, console)


def _show_throughput(result: ThroughputResult, console: Console) -> None:
    """Print requests and tokens per second in vLLM's format."""
    console.print(
        f"Throughput: {result.requests_per_second:.2f} requests/s, {result.tokens_per_second:.2f} total tokens/s, "
        f"{result.output_tokens_per_second:.2f} output tokens/s"
    )
    console.print(f"Total num prompt tokens:  {result.num_prompt_tokens}")
    console.print(f"Total num output tokens:  {result.num_output_tokens}")
    _show_speculation(result.speculation, console)


def _show_speculation(stats: SpeculationStats, console: Console) -> None:
    """Print the acceptance of drafts, if there were any."""
    if stats.num_drafts:
        for name, value in speculation_rows(stats):
            console.print(f"{name}: {value}")
