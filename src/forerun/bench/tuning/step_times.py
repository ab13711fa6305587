"""Measures what steps take, as far as the load can bring them: the sweep of `forerun profile` over a grid of the workload's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import forerun
from forerun.bench.compare import make_engine
from forerun.bench.energy import EnergyMeter
from forerun.bench.instruments import BandwidthProbe, Progress, Stopwatch, read_by_torch
from forerun.bench.machine import describe_kernels, machine_name
from forerun.bench.profiling.filling import filling_config
from forerun.bench.profiling.grid import MIXED_ROWS, ProfileGrid
from forerun.bench.profiling.step_sweep import step_sweep
from forerun.bench.tuning.requests import TuningWorkload
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.plan.profile import Profile
from forerun.plan.step_times import StepTimeModel
from forerun.plan.tuning.candidates import BatchLimits

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFT_LENGTHS = (0, 1, 2, 3, 5, 8, 12, 16)
NUM_ROUNDS, NUM_STEPS = 1, 2  # after one that warms up; of each draft length in each batch
LEAST_CONTEXT = 16

LoadTarget = Callable[[str | None], LoadedTarget]
"""Loads the model, its weights in a format or (None) as they are stored."""


def step_grid(workload: TuningWorkload, max_num_seqs: int, *, max_model_len: int | None = None) -> ProfileGrid:
    """What is measured: the workload's prompts and contexts, and up to as many sequences as it can bring.

    Args:
        workload: what is served.
        max_num_seqs: sequences that run at once, at most.
        max_model_len: tokens that the model allows; None: any number.
    """
    most = max(2, workload.most_running(max_num_seqs))
    lengths = sorted(map(len, workload.prompts))
    inputs = {lengths[0], lengths[len(lengths) // 2], lengths[-1]}
    while len(inputs) < 3:  # a curve needs three points, also where all prompts are equally long
        longer = 2 * max(inputs)
        inputs.add(longer if max_model_len is None or longer < max_model_len else max(1, min(inputs) // 2))
    longest = max(workload.longest, 2 * LEAST_CONTEXT)
    grid = ProfileGrid(
        input_lengths=tuple(sorted(inputs)),
        num_sequences=(*(size for size in BATCH_SIZES if size < most), most),
        contexts=(max(LEAST_CONTEXT, longest // 3), longest),
        draft_lengths=DRAFT_LENGTHS,
        rounds=NUM_ROUNDS,
        steps=NUM_STEPS,
    )
    room = longest if max_model_len is None else max_model_len - grid.tokens_beyond_context
    return grid if longest <= room else replace(grid, contexts=(max(1, room // 3), room))


def measure_step_times(
    target: LoadedTarget, settings: EngineSettings, workload: TuningWorkload, limits: BatchLimits, progress: Progress
) -> StepTimeModel:
    """Time steps of an engine with room for the whole grid, and fit a model to them.

    Raises:
        ForerunError: a prompt does not fit, or the engine has no prefix cache.
    """
    grid = step_grid(workload, limits.max_num_seqs, max_model_len=target.model.max_model_len)
    most = max(grid.num_sequences)
    longest = max(max(grid.contexts) + MIXED_ROWS[-1] + grid.tokens_beyond_context, max(grid.input_lengths) + 2)
    llm = make_engine(
        "step times",
        target,
        replace(
            settings,
            max_num_seqs=most + 1,  # one more reads its prompt beside the others
            max_num_batched_tokens=max(limits.max_num_batched_tokens, most + 1),
            kv_cache_memory_bytes=None,
        ),
        filling_config(grid.longest_draft),
        num_sequences=most + 2,
        longest=min(longest, target.model.max_model_len),
    )
    probe = BandwidthProbe(Stopwatch(llm.device), read=llm.kernels.read if llm.kernels else read_by_torch)
    samples = []
    with step_sweep(llm, grid, probe, EnergyMeter([])) as sweep:
        sweep.warm_up(progress)
        for number in range(grid.rounds):
            result = sweep.run_round(number, lambda line, n=number: progress(f"step times, round {n + 1}: {line}"))  # type: ignore[misc]
            samples += [step.sample for step in result.steps]
    return StepTimeModel.fit(samples)


def check_profile(
    profile: Profile, settings: EngineSettings, quantizations: Sequence[str | None], load_target: LoadTarget
) -> None:
    """Refuse a profile of something else than what is tuned, whose step times would decide.

    Raises:
        ConfigError: it is of another model, machine, version or number format, or computed otherwise.
    """
    if profile.quantization not in quantizations:
        raise ConfigError(
            f"profile: it is of weights in the format {profile.quantization}, and tuned are "
            f"{', '.join(map(str, quantizations))}; give another profile, or leave it out"
        )
    settings = replace(settings, quantization=profile.quantization)
    target = load_target(profile.quantization)
    llm = make_engine("profile", target, settings, None, num_sequences=1, longest=LEAST_CONTEXT)
    profile.check_fits(
        model=settings.model,
        machine=machine_name(target.model.device),
        version=forerun.__version__,
        kernels=describe_kernels(llm),
        dtype=str(llm.dtype).removeprefix("torch."),
        tensor_parallel_size=settings.tensor_parallel_size,
        kernel_settings=settings.kernel_settings,
    )


def step_times_today(profile: Profile, target: LoadedTarget) -> StepTimeModel:
    """A profile's step times; reading weights and context takes longer by as much as the memory is slower than when it was made."""
    if profile.gigabytes_per_second is None:
        return profile.step_times
    read = target.kernels.read if target.kernels else read_by_torch
    now = BandwidthProbe(Stopwatch(target.model.device), read=read).measure() / 1e9
    return profile.step_times.scaled(memory=profile.gigabytes_per_second / now)
