"""Compares speculative configurations with plain decoding, in turn on the same prompts over one loaded target."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from forerun.bench.instruments import (
    BandwidthProbe,
    Clock,
    Interrupted,
    Progress,
    Stopwatch,
    no_progress,
    read_by_torch,
    whole_rounds,
)
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.outcomes import PLAIN, Answers, Comparison, Judge, Outcome, Rounds, summarise
from forerun.bench.prompts import check_room
from forerun.bench.workloads import ComparisonWorkload
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig, resolve_speculative
from forerun.core.sampling_params import GREEDY_BELOW, SamplingParams
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.llm import LLM
from forerun.models.base import LoadedTarget

NUM_WARMUP_TOKENS = 16


def measure_comparison(
    target: LoadedTarget,
    settings: EngineSettings,
    configs: Mapping[str, Mapping[str, Any]],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    workload: ComparisonWorkload,
    *,
    judge: Judge | None = None,
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Answer every prompt with every configuration and without drafts, in turn, round after round.

    All engines share the target's weights; each has KV memory of its own for one batch. A round reuses
    neither prefix-cached KV nor what a drafter remembers of earlier rounds. Every other round takes the
    configurations in reverse order, so that a drift of the machine affects all alike.

    Args:
        target: the model.
        settings: of all engines; max_model_len and KV memory follow from the prompts.
        configs: name -> speculative_config.
        prompts: kind -> token ids of each prompt.
        workload: tokens to generate, rounds, batch size, temperature.
        judge: decides for each greedy text that differs and must not whether rounding explains it.
            None: that is not looked for.
        progress: is called with the state of the measurement.
        clock: times the answers.

    Raises:
        ForerunError: a configuration (named in the message) or a prompt does not fit the target.
        Interrupted: Ctrl-C came after a whole round, or while texts were judged.
    """
    check_batch_size(settings, workload)
    prompts = {kind: ids[: workload.num_prompts] for kind, ids in prompts.items()}
    longest = _longest(target, settings, prompts, workload)
    engines = {
        name: make_engine(name, target, settings, config, num_sequences=workload.batch_size, longest=longest)
        for name, config in {PLAIN: None, **configs}.items()
    }
    plain = engines[PLAIN]
    probe = BandwidthProbe(Stopwatch(plain.device, clock), read=plain.kernels.read if plain.kernels else read_by_torch)
    rounds = _measure_rounds(engines, prompts, workload, probe, progress=progress, clock=clock)
    bandwidths = [one.gigabytes_per_second for one in rounds]
    found = {
        (kind, name): Rounds(kind=kind, name=name, llm=llm, answers=[one.answers[kind][name] for one in rounds])
        for kind in prompts
        for name, llm in engines.items()
    }
    progress("comparing the texts")
    outcomes: list[Outcome] = []
    is_greedy = workload.temperature < GREEDY_BELOW
    left_open = ""
    for (kind, _), of_one in found.items():
        summary = partial(summarise, of_one, found[kind, PLAIN], prompts[kind], is_greedy=is_greedy)
        try:
            outcomes.append(summary(judge=judge))
        except KeyboardInterrupt:
            judge, left_open = None, ", and not all texts that differ were looked at for near-ties"
            outcomes.append(summary(judge=None))
    comparison = Comparison(
        model=settings.model,
        dtype=str(plain.dtype).removeprefix("torch."),
        device=str(plain.device),
        kernels=describe_kernels(plain),
        machine=describe_machine(plain.device),
        repeats=len(rounds),
        max_tokens=workload.max_tokens,
        batch_size=workload.batch_size,
        temperature=workload.temperature,
        gigabytes_per_second=statistics.median(bandwidths),
        all_gigabytes_per_second=bandwidths,
        configs=configs,
        outcomes=outcomes,
        reports={
            name: report
            for name, llm in engines.items()
            if (choices := llm.engine.parts.control.choices()) is not None and (report := choices.report()) is not None
        },
    )
    if len(rounds) < workload.repeats or left_open:
        raise Interrupted(comparison, f"{len(rounds)} of {workload.repeats} rounds{left_open}")
    return comparison


class _Round(NamedTuple):
    """A whole round: the memory's bandwidth, and the answers by kind of prompts and configuration."""

    gigabytes_per_second: float
    answers: dict[str, dict[str, list[Answers]]]


def _measure_rounds(
    engines: Mapping[str, LLM],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    workload: ComparisonWorkload,
    probe: BandwidthProbe,
    *,
    progress: Progress,
    clock: Clock,
) -> list[_Round]:
    """All rounds, or those that were whole when Ctrl-C came, if any were."""
    progress("warming up")
    for llm in engines.values():
        _warm_up(llm, next(iter(prompts.values())), workload)

    def measure(number: int) -> _Round:
        bandwidth = probe.measure() / 1e9
        answers: dict[str, dict[str, list[Answers]]] = {}
        for kind, ids in prompts.items():
            progress(f"round {number + 1} of {workload.repeats}: {kind}")
            answers[kind] = _run_round(engines, ids, workload, number=number, clock=clock)
        return _Round(bandwidth, answers)

    return whole_rounds(measure, workload.repeats)


def check_batch_size(settings: EngineSettings, workload: ComparisonWorkload) -> None:
    """Refuse a batch that the engines would split.

    Raises:
        ConfigError: the batch size is above max_num_seqs.
    """
    if workload.batch_size > settings.max_num_seqs:
        raise ConfigError(
            f"batch_size: got {workload.batch_size}; max_num_seqs is {settings.max_num_seqs}; lower it or raise max_num_seqs"
        )


def _longest(
    target: LoadedTarget,
    settings: EngineSettings,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    workload: ComparisonWorkload,
) -> int:
    """Tokens of the longest prompt and its answer.

    Raises:
        ConfigError: there is no prompt, or the engine would cut an answer off.
    """
    if not prompts or not all(prompts.values()):
        raise ConfigError("prompts: got none; give one or more of each kind")
    check_room(prompts, workload.max_tokens, most=settings.max_model_len or target.model.max_model_len)
    return max(len(prompt) for ids in prompts.values() for prompt in ids) + workload.max_tokens


def make_engine(
    name: str,
    target: LoadedTarget,
    settings: EngineSettings,
    config: Mapping[str, Any] | None,
    *,
    num_sequences: int,
    longest: int,
) -> LLM:
    """Make an engine over the shared weights, with KV memory for one batch unless the settings give its size.

    Args:
        name: of the configuration, for errors.
        target: the model.
        settings: of the engine.
        config: its speculative_config; None for plain decoding.
        num_sequences: of a batch.
        longest: tokens of the longest prompt and its answer.

    Raises:
        ForerunError: the configuration (named in the message) does not fit the target.
    """
    try:
        speculative = resolve_speculative(config)
        sized = sized_settings(settings, speculative, num_sequences=num_sequences, longest=longest)
        return LLM.from_target(target, replace(sized, speculative_config=config), speculative)
    except ForerunError as error:
        raise type(error)(f"{name}: {error}") from error


def sized_settings(
    settings: EngineSettings, speculative: SpeculativeConfig, *, num_sequences: int, longest: int
) -> EngineSettings:
    """Settings with the longest sequence and, unless they give its size, with KV memory for so many of them at once."""
    blocks_each = -(-(longest + speculative.num_speculative_tokens) // settings.block_size) + 1
    return replace(
        settings,
        max_model_len=longest,
        num_gpu_blocks_override=None if settings.kv_cache_memory_bytes else num_sequences * blocks_each,
    )


def _warm_up(llm: LLM, prompts: Sequence[Sequence[int]], workload: ComparisonWorkload) -> None:
    """Answer the first batch with a few tokens."""
    batch = prompts[: workload.batch_size]
    short = SamplingParams(temperature=workload.temperature, max_tokens=min(NUM_WARMUP_TOKENS, workload.max_tokens))
    answer(llm, batch, [short] * len(batch), salt="warm-up")


def _run_round(
    engines: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    workload: ComparisonWorkload,
    *,
    number: int,
    clock: Clock,
) -> dict[str, list[Answers]]:
    """Answer each batch with every engine in turn."""
    order = list(engines) if number % 2 == 0 else list(engines)[::-1]
    answers: dict[str, list[Answers]] = {name: [] for name in engines}
    seed = engines[PLAIN].settings.seed
    for start in range(0, len(prompts), workload.batch_size):
        batch = prompts[start : start + workload.batch_size]
        params = [
            SamplingParams(temperature=workload.temperature, max_tokens=workload.max_tokens, seed=seed + start + place)
            for place in range(len(batch))
        ]
        for name in order:
            answers[name].append(answer(engines[name], batch, params, salt=f"round {number}", clock=clock))
    return answers


def answer(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    salt: str,
    clock: Clock = time.perf_counter,
) -> Answers:
    """Answer prompts (token ids) as one batch to their ends.

    Prompts of different salts share neither prefix-cached KV nor what a drafter remembers.

    Raises:
        RequestError: a request does not fit, or failed while it ran.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    without_token = set(range(len(prompts)))
    num_failed_drafts = 0
    llm.reset_stats()
    start = decode_start = clock()
    for delta in llm.stream([{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts], params):
        if delta.finish_reason == "error":
            raise RequestError(f"prompt {delta.request_id} failed: {delta.stop_reason}; nothing was measured")
        place = int(delta.request_id)
        texts[place] += delta.token_ids
        if without_token and delta.token_ids:
            without_token.discard(place)
            if not without_token:
                num_failed_drafts = llm.stats.num_failed_drafts
                llm.reset_stats()
                decode_start = clock()
    end = clock()
    return Answers(
        texts=texts,
        seconds=end - start,
        decode_seconds=end - decode_start,
        num_decode_tokens=llm.stats.num_generation_tokens,
        num_failed_drafts=num_failed_drafts + llm.stats.num_failed_drafts,
        speculation=llm.stats.speculation,
        times=llm.stats.times,
    )
