"""Runs an experiment: measures its runs in order, and writes the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.experiment import console as lines
from benchmarks.experiment import summary
from benchmarks.experiment.console import ExperimentConsole
from benchmarks.experiment.engines import ENGINES, find_python, num_visible_gpus
from benchmarks.experiment.measure import Outcome, measure
from benchmarks.experiment.placement import Placement, place
from benchmarks.experiment.plan import without_effect
from benchmarks.experiment.prompts import draw_prompts, max_prompt_tokens, read_texts
from benchmarks.experiment.results import Measured, check_output, output_file, write_json, write_results
from benchmarks.experiment.settings import Settings, unknown_variables
from benchmarks.experiment.start import PLAIN, SPECULATIVE, Launch, Run, Started, start
from forerun.bench.prompts import encode_prompt
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer

MIN_RATE_SHARE = 0.95
"""The share of AUTO_RATE below which a run is reported as too slow."""

Result = dict[str, Any]


def run(
    settings: Settings, runs: Sequence[Run], environment: Mapping[str, str], console: ExperimentConsole
) -> list[Result]:
    """Measure all runs one after the other and write their results, and for several runs the comparison.

    Raises:
        ForerunError: a variable is wrong, an engine is not installed, or one fails without speculation too.
    """
    check_output(Path(settings.output_file))
    engines = tuple(dict.fromkeys(one.engine for one in runs))
    for warning in (*unknown_variables(environment, engines), *without_effect(settings, engines)):
        console.warn(warning)
    placement = _place(settings)
    for engine in engines:
        find_python(engine)
        ENGINES[engine].settings(settings, placement)  # raises for unfit settings before anything is loaded
    for line in lines.configuration(settings, runs):
        console.print(line)
    model = resolve_model(settings.target_model)
    tokenizer = load_tokenizer(model)
    texts = read_texts(settings, console.warn)
    results = []
    for one in runs:
        launch = Launch(
            run=one,
            settings=settings,
            placement=placement,
            model=model,
            caller=environment,
            log=output_file(settings, one.key).with_suffix(".log"),
        )
        results.append(_run(launch, tokenizer, texts, console))
    if len(results) > 1:
        comparison = summary.compare(results)
        console.print("")
        console.print(summary.comparison_table(results, comparison))
        by_run = {one.key: result for one, result in zip(runs, results, strict=True)}
        write_results(
            output_file(settings, "comparison"), {**by_run, "comparison": comparison}, settings, console.warnings
        )
    return results


def _run(launch: Launch, tokenizer: Tokenizer, texts: Sequence[str], console: ExperimentConsole) -> Result:
    settings = launch.settings

    def prompts() -> Iterator[list[int]]:
        return draw_prompts(
            texts,
            lambda text: encode_prompt(tokenizer, text),
            max_tokens=max_prompt_tokens(settings),
            seed=settings.seed,
        )

    def fall_back(reason: str) -> None:
        console.warnings.append(f"{launch.run.key}: {reason}; falling back to target-only generation")
        for line in lines.fallback(reason):
            console.print(line)

    def show(prompt: list[int], answer: list[int]) -> None:
        if settings.enable_debug:
            console.print(f"📝 Prompt: {tokenizer.decode(prompt)}\n💬 Answer: {tokenizer.decode(answer)}")

    console.print("")
    console.print(lines.starting(launch.run))
    drawn = prompts()
    warm_up = [next(drawn) for _ in range(settings.prompts_per_batch)]
    started = start(launch, warm_up, fall_back=fall_back)
    with closing(started.worker):
        for line in lines.started(launch.run, started.version, started.speculation, started.load_seconds):
            console.print(line)
        outcome = measure(started, settings, prompts(), print_line=console.print, show_answer=show)
    result = to_result(launch.run, settings, started, outcome, console)
    for line in summary.run_lines(result):
        console.print(line)
    monitoring = _monitoring(outcome)
    both = {launch.run.key: result} if monitoring is None else {launch.run.key: result, "gpu_monitoring": monitoring}
    write_results(output_file(settings, launch.run.key), both, settings, console.warnings)
    if monitoring is not None:
        write_json(output_file(settings, f"{launch.run.key}_gpu"), monitoring)
    console.print(f"✅ Results saved to {output_file(settings, launch.run.key)}")
    return result


def to_result(run: Run, settings: Settings, started: Started, outcome: Outcome, console: ExperimentConsole) -> Result:
    """The result of a run as JSON: the original benchmark's keys, and some that it lacks."""
    measured = outcome.measured
    method, reason = effective(started, measured)
    if reason != started.fallback_reason:
        console.warn(f"{run.key}: {reason}")
    achieved = len(measured.requests) / measured.seconds
    asked = None if settings.num_prompts else settings.auto_rate
    if asked is not None and achieved < MIN_RATE_SHARE * asked:
        console.warn(
            f"{run.key}: AUTO_RATE is {asked:g} prompts/s, the engine answered {achieved:.2f}; it was too slow"
        )
    return {
        **measured.to_json(run.method),
        "engine": run.engine,
        "effective_method": method,
        "fallback_reason": reason,
        "speculation": started.speculation,
        "version": started.version,
        "load_seconds": started.load_seconds,
        "asked_rate": asked,
        "achieved_rate": achieved,
        "energy": outcome.energy.to_json(
            output_tokens=measured.num_tokens,
            total_tokens=measured.num_tokens + measured.num_prompt_tokens,
            requests=len(measured.requests),
        ),
    }


def effective(started: Started, measured: Measured) -> tuple[str, str | None]:
    """The method that was really used and the reason of a fallback: if all drafts fail, decoding is plain."""
    if started.effective_method == SPECULATIVE and measured.num_failed_drafts and not measured.num_drafted:
        return PLAIN, f"all {measured.num_failed_drafts} drafts failed; its log says why"
    return started.effective_method, started.fallback_reason


def _monitoring(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.monitor is None:
        return None
    measured = outcome.measured
    return outcome.monitor.to_json(
        tokens=measured.num_tokens, accepted=measured.num_accepted, requests=len(measured.requests)
    )


def _place(settings: Settings) -> Placement:
    return place(
        settings.gpu_strategy,
        num_visible_gpus(),
        target_gpu=settings.target_gpu,
        drafter_gpu=settings.drafter_gpu,
        target_ratio=settings.target_gpu_ratio,
        drafter_ratio=settings.drafter_gpu_ratio,
    )
