"""The experiment: what is run, in which order, and the files that come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.experiment import banner, summary
from benchmarks.experiment.engines import ROSTER, find_python, num_visible_gpus
from benchmarks.experiment.files import check_output, output_file, write_json, write_results
from benchmarks.experiment.measure import Outcome, measure
from benchmarks.experiment.placement import Placement, place
from benchmarks.experiment.plan import without_effect
from benchmarks.experiment.prompts import draw_prompts, most_prompt_tokens, read_texts
from benchmarks.experiment.results import Measured
from benchmarks.experiment.settings import Settings, unknown_variables
from benchmarks.experiment.start import PLAIN, SPECULATIVE, Launch, Run, Started, start
from benchmarks.experiment.voice import Voice
from forerun.bench.prompts import encode_prompt
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer

KEPT_UP = 0.95
"""Share of AUTO_RATE that a run must reach to count as that rate."""

Result = dict[str, Any]


def run(settings: Settings, runs: Sequence[Run], environment: Mapping[str, str], voice: Voice) -> list[Result]:
    """Measure all runs one after the other and write their results, then the comparison if there are several.

    Raises:
        ForerunError: a variable is wrong, an engine is not installed, or one fails without speculation too.
    """
    check_output(Path(settings.output_file))
    engines = tuple(dict.fromkeys(one.engine for one in runs))
    for warning in (*unknown_variables(environment, engines), *without_effect(settings, engines)):
        voice.warn(warning)
    placement = _place(settings)
    for engine in engines:
        find_python(engine)
        ROSTER[engine].settings(settings, placement)  # refuses what does not fit, before anything is loaded
    for line in banner.configuration(settings, runs):
        voice.tell(line)
    model = resolve_model(settings.target_model)
    tokenizer = load_tokenizer(model)
    texts = read_texts(settings, voice.warn)
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
        results.append(_run(launch, tokenizer, texts, voice))
    if len(results) > 1:
        comparison = summary.compare(results)
        voice.tell("")
        voice.console.print(summary.comparison_table(results, comparison))
        everything = {one.key: result for one, result in zip(runs, results, strict=True)}
        write_results(
            output_file(settings, "comparison"), {**everything, "comparison": comparison}, settings, voice.warnings
        )
    return results


def _run(launch: Launch, tokenizer: Tokenizer, texts: Sequence[str], voice: Voice) -> Result:
    settings = launch.settings

    def prompts() -> Iterator[list[int]]:
        return draw_prompts(
            texts,
            lambda text: encode_prompt(tokenizer, text),
            most_tokens=most_prompt_tokens(settings),
            seed=settings.seed,
        )

    def fall_back(reason: str) -> None:
        voice.warnings.append(f"{launch.run.key}: {reason}; falling back to target-only generation")
        for line in banner.fallback(reason):
            voice.tell(line)

    def show(prompt: list[int], answer: list[int]) -> None:
        if settings.enable_debug:
            voice.tell(f"📝 Prompt: {tokenizer.decode(prompt)}\n💬 Answer: {tokenizer.decode(answer)}")

    voice.tell("")
    voice.tell(banner.starting(launch.run))
    drawn = prompts()
    warm_up = [next(drawn) for _ in range(settings.prompts_per_batch)]
    started = start(launch, warm_up, fall_back=fall_back)
    with closing(started.worker):
        for line in banner.started(launch.run, started.version, started.speculation, started.load_seconds):
            voice.tell(line)
        outcome = measure(started, settings, prompts(), tell=voice.tell, show=show)
    result = to_result(launch.run, settings, started, outcome, voice)
    for line in summary.run_lines(result):
        voice.tell(line)
    monitoring = _monitoring(outcome)
    both = {launch.run.key: result} if monitoring is None else {launch.run.key: result, "gpu_monitoring": monitoring}
    write_results(output_file(settings, launch.run.key), both, settings, voice.warnings)
    if monitoring is not None:
        write_json(output_file(settings, f"{launch.run.key}_gpu"), monitoring)
    voice.tell(f"✅ Results saved to {output_file(settings, launch.run.key)}")
    return result


def to_result(run: Run, settings: Settings, started: Started, outcome: Outcome, voice: Voice) -> Result:
    """The original's keys and our own."""
    measured = outcome.measured
    method, reason = effective(started, measured)
    if reason != started.fallback_reason:
        voice.warn(f"{run.key}: {reason}")
    achieved = len(measured.requests) / measured.seconds
    asked = None if settings.num_prompts else settings.auto_rate
    if asked is not None and achieved < KEPT_UP * asked:
        voice.warn(f"{run.key}: AUTO_RATE is {asked:g} prompts/s, the engine answered {achieved:.2f}; it was too slow")
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
    """What was really done: an engine that goes on without its failing drafter decodes plainly."""
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
