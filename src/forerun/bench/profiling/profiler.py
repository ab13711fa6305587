"""Measures a model in this process: steps in rounds, texts, drafters; each stage is kept in the profile's folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forerun
from forerun.bench.compare import make_engine
from forerun.bench.drafter_files import drafter_fingerprints
from forerun.bench.energy import EnergyMeter
from forerun.bench.instruments import (
    Advance,
    BandwidthProbe,
    Clock,
    Progress,
    Stopwatch,
    Work,
    no_advance,
    no_progress,
    read_by_torch,
)
from forerun.bench.machine import describe_kernels, describe_machine, machine_name
from forerun.bench.offline import check_outputs
from forerun.bench.passes import PassBytes
from forerun.bench.profiling.filling import filling_config
from forerun.bench.profiling.grid import (
    DRAFTING_TOKENS,
    GRIDS,
    NUM_WARMUP_ROUNDS,
    RECORDED_AT_ONCE,
    ROUGH_GRID,
    ProfileGrid,
)
from forerun.bench.profiling.measured_drafter import (
    CHECKED_TOKENS,
    DrafterMeasurement,
    MeasuredDrafter,
    drafter_stage,
)
from forerun.bench.profiling.output import write_outputs
from forerun.bench.profiling.stages import RECORDING_FILE, Stages, begun_identity, digest, held_stages
from forerun.bench.profiling.step_sweep import RoundResult, level_rounds, step_sweep
from forerun.bench.prompts import check_room
from forerun.bench.recording import Recording, read_recording, record, write_recording
from forerun.bench.replay import drafts_from_text
from forerun.bench.workloads import check_temperature
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.core.sampling_params import SamplingParams
from forerun.errors import ConfigError
from forerun.executor.device import DeviceExecutor
from forerun.kv.cache import bytes_per_block
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.models.decoder import Decoder
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.profile import Profile, check_config
from forerun.plan.step_times import StepTimeModel

ROUGH_ROUND = -2  # its number; warming up is -1
REST_SECONDS = 2.0
SECONDS_TO_FINISH = 3.0  # engines are made, files written, pictures drawn
LEAST_ANSWER = 3  # tokens: the prompt's own step writes the first, and behind a draft of one the target adds another
OF_KV_MEMORY = ("model", "quantization", "block_size", "tensor_parallel_size", "gpu_memory_utilization")
"""Settings that the bytes of a KV block, and how many there may be, go by."""

STEPS_ALONE = (
    "the steps were timed one at a time, while an engine that serves on this device begins each before it has read the one "
    "before, so that the host's work takes no time of the device's: step times are upper bounds, and so are the latencies "
    "that simulations and plans compute of them"
)
"""Of an engine whose steps are the device's: what its profile does not know."""

MADE_UP = (
    "the weights were made up (load_format dummy): step times are those of the model, but its texts are not, so what stands "
    "of drafts says nothing of the real one"
)
"""Of a model without its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTask:
    """What is profiled: an engine's settings, configurations, prompts by class, and how thoroughly."""

    settings: EngineSettings
    configs: Mapping[str, Mapping[str, Any]]
    prompts: Mapping[str, Sequence[Sequence[int]]]
    grid: ProfileGrid | None = None  # None: what fits the budget
    budget_seconds: float | None = None  # for all stages, loading left out; None: no limit
    temperature: float = 0.0  # of the recorded texts

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts.values()):
            raise ConfigError("prompts: got none; give one or more of each class")
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ConfigError(f"budget: got {self.budget_seconds:g} s; must be above 0, e.g. 60s")
        check_temperature("temperature", self.temperature)
        for name, config in self.configs.items():
            if not resolve_speculative(config).num_speculative_tokens:
                raise ConfigError(
                    f"configs, {name}: got num_speculative_tokens 0, which drafts nothing; leave it out, as every profile "
                    "measures steps without drafts"
                )
            check_config(f"configs, {name}", config, do="write it so, or leave it out")
            if "/" in name:
                raise ConfigError(
                    f"configs: got the name {name!r}; may not contain /, which sets classes of prompts apart"
                )


@dataclass(slots=True, kw_only=True)
class Profiler:
    """Runs the stages of a profile that have not been run, and writes it.

    Args:
        target: the model.
        task: what is profiled.
        folder: of the profile.
        overwrite: begin anew, whatever the folder has.
        progress: is called with the state of the work.
        announce: is called with lines that stay: the estimate, what is left out.
        advance: is called with the share of the work that is done.
        clock: times the steps.
    """

    target: LoadedTarget
    task: ProfileTask
    folder: Path
    overwrite: bool = False
    progress: Progress = no_progress
    announce: Progress = no_progress
    advance: Advance = no_advance
    clock: Clock = time.perf_counter

    def run(self) -> Profile:
        """Measure what is missing.

        Raises:
            ForerunError: the folder has something else, a configuration or prompt does not fit, or memory is short.
        """
        started = time.monotonic()
        self.task = replace(self.task, settings=self._settings_as_begun())
        self._check_configs()
        llm = self._sweep_engine()
        times = self._rough_times(llm)
        grid = self._grid(llm, times)
        self._check_prompts(grid)
        self._check_answers(llm, grid)
        identity = self._identity(llm, grid)
        with held_stages(self.folder, identity, overwrite=self.overwrite, started=started) as stages:
            num_ended = len(stages.names())
            if num_ended:
                self.announce(f"{self.folder} has {num_ended} finished stage(s); going on from there")
            of_rounds, of_texts = grid.seconds_of_rounds(times), self._text_seconds(grid, times)
            work = Work(of_rounds + of_texts, self.advance)
            rounds = self._rounds(llm, grid, stages, work, seconds=of_rounds)
            limits, notes = _limits(llm, self.target), self._notes(llm)
            del llm  # its KV memory
            part = of_texts / (1 + len(self.task.configs))
            recording = self._recording(grid, stages)
            work.add(part)
            step_times = StepTimeModel.fit(level_rounds(rounds))
            measurement = DrafterMeasurement(
                target=self.target,
                settings=self.task.settings,
                recording=recording,
                step_times=step_times,
                folder=self.folder,
                progress=self.progress,
                clock=self.clock,
            )
            drafters = self._drafters(measurement, stages, lambda: work.add(part))
            conditions = self._conditions(grid, rounds) | notes
            conditions |= {"num_texts": len(recording.texts), "seconds": round(stages.seconds, 1)}
            profile = self._profile(limits, rounds, step_times, drafters, conditions)
            if not write_outputs(profile, rounds, self.folder):
                self.announce("there is no page of plots, as matplotlib is not installed; pip install 'forerun[bench]'")
            profile.save(self.folder)  # last: a folder with profile.json is whole
        for note in notes.values():
            if note is not None:
                self.announce(f"warning: {note}")
        return profile

    def _begun(self) -> dict[str, Any] | None:
        """What the profile that this one goes on with depends on; None where it begins."""
        return None if self.overwrite else begun_identity(self.folder)

    def _settings_as_begun(self) -> EngineSettings:
        """The settings, with as much KV memory as the profile that was begun had, where they leave it to what is free."""
        settings = self.task.settings
        if settings.num_gpu_blocks_override is not None or settings.kv_cache_memory_bytes is not None:
            return settings
        begun = self._begun()
        if begun is None or any(begun.get(name) != getattr(settings, name) for name in OF_KV_MEMORY):
            return settings
        num_blocks = begun.get("num_blocks")
        return replace(settings, num_gpu_blocks_override=num_blocks) if isinstance(num_blocks, int) else settings

    def _check_configs(self) -> None:
        """Make each drafter that is still to be measured, so that what is wrong is said before hours of measuring."""
        begun = Stages(self.folder)
        for name, config in self.task.configs.items():
            if self.overwrite or not begun.path(drafter_stage(name)).exists():
                self.progress(f"looking at {name}")
                make_engine(name, self.target, self.task.settings, config, num_sequences=1, longest=CHECKED_TOKENS)

    def _check_prompts(self, grid: ProfileGrid) -> None:
        """Refuse prompts whose answers the model has no room for, before hours of measuring too."""
        given = {kind: prompts[: grid.num_texts] for kind, prompts in self.task.prompts.items()}
        check_room(given, max(grid.max_tokens, DRAFTING_TOKENS), most=self.target.model.max_model_len)

    def _check_answers(self, llm: LLM, grid: ProfileGrid) -> None:
        """Refuse prompts that are all answered in so few tokens that no draft could be judged, before hours of measuring too.

        One long answer is enough, and the first is mostly one. Prompts that the engine itself has no room for may have one.
        """
        temperature = self.task.temperature
        has_trace = [resolve_speculative(one).goes_by_text(temperature) for one in self.task.configs.values()]
        if not any(has_trace) or self._begun() is not None:
            return
        self.progress("how answers begin")
        for prompts in self.task.prompts.values():
            for seed, ids in enumerate(prompts[: grid.num_texts]):
                sampling = SamplingParams(temperature=temperature, max_tokens=LEAST_ANSWER, seed=seed, detokenize=False)
                if len(ids) + LEAST_ANSWER > llm.max_model_len:
                    return
                outputs = llm.generate([list(ids)], sampling, use_tqdm=False)
                check_outputs(outputs)
                if len(outputs[0].outputs[0].token_ids) == LEAST_ANSWER:
                    return
        raise ConfigError(
            f"prompts: the model answers each of them in fewer than {LEAST_ANSWER} tokens, by which no draft can be judged; "
            "give others, with longer answers"
        )

    def _sweep_engine(self) -> LLM:
        """The engine as it will run, with a drafter that fills drafts."""
        longest = max(GRIDS["long"].longest_draft, self.task.grid.longest_draft if self.task.grid else 0)
        config = filling_config(longest)
        return LLM.from_target(
            self.target, replace(self.task.settings, speculative_config=config), resolve_speculative(config)
        )

    def _rough_times(self, llm: LLM) -> StepTimeModel:
        """What steps take, roughly: fitted to a small round, after one that warms up."""
        self.progress("a few steps, to estimate the rest")
        grid, (probe, meter) = ROUGH_GRID.within(**self._room(llm)), self._instruments(llm)
        with step_sweep(llm, grid, probe, meter, clock=self.clock) as sweep:
            sweep.warm_up()
            result = sweep.run_round(ROUGH_ROUND)
        return StepTimeModel.fit([step.sample for step in result.steps])

    def _instruments(self, llm: LLM) -> tuple[BandwidthProbe, EnergyMeter]:
        stopwatch = Stopwatch(llm.device, self.clock)
        probe = BandwidthProbe(stopwatch, read=llm.kernels.read if llm.kernels else read_by_torch)
        return probe, EnergyMeter.of_this_machine()

    def _room(self, llm: LLM) -> dict[str, int]:
        """What an engine has room for, in the words of `ProfileGrid.within`."""
        return {
            "max_model_len": llm.max_model_len,
            "max_num_seqs": self.task.settings.max_num_seqs,
            "num_slots": llm.engine.parts.pool.num_blocks * llm.engine.parts.block_size,
        }

    def _grid(self, llm: LLM, times: StepTimeModel) -> ProfileGrid:
        """The grid that was asked for, or the largest within the budget, as far as the engine has room for it.

        A profile that was begun within a budget goes on with its grid, whatever the machine's speed is by now.
        """
        wanted, room = self.task.grid, self._room(llm)
        if wanted is None:
            begun = self._begun()
            return self._grid_within_budget(room, times) if begun is None else self._begun_grid(begun)
        grid = wanted.within(**room)
        self.announce(f"about {self._estimate(grid, times):.0f} s")
        self._announce_left_out(wanted, grid)
        return grid

    def _begun_grid(self, begun: Mapping[str, Any]) -> ProfileGrid:
        try:
            return ProfileGrid.from_json(begun["grid"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.folder}: the grid of the profile that was begun is damaged ({error!r}); give another folder, or "
                "--overwrite"
            ) from None

    def _grid_within_budget(self, room: Mapping[str, int], times: StepTimeModel) -> ProfileGrid:
        """The largest grid that the budget suffices for, else the smallest that there is room for."""
        grids = _grids_within(room)
        budget = float("inf") if self.task.budget_seconds is None else self.task.budget_seconds
        fitting = [name for name, one in grids.items() if self._estimate(one, times) <= budget]
        name = fitting[-1] if fitting else next(iter(grids))
        seconds = self._estimate(grids[name], times)
        if seconds > budget:
            self.announce(
                f"the budget of {budget:.0f} s is short for the smallest grid, which takes about {seconds:.0f} s"
            )
        else:
            self.announce(f"grid {name!r}: about {seconds:.0f} s")
        self._announce_left_out(GRIDS[name], grids[name])
        return grids[name]

    def _announce_left_out(self, wanted: ProfileGrid, grid: ProfileGrid) -> None:
        if left_out := wanted.left_out(grid):
            self.announce(f"the engine has no room for {left_out}: not measured")

    def _estimate(self, grid: ProfileGrid, times: StepTimeModel) -> float:
        return SECONDS_TO_FINISH + grid.seconds_of_rounds(times) + self._text_seconds(grid, times)

    def _text_seconds(self, grid: ProfileGrid, times: StepTimeModel) -> float:
        configs, vocab_size = self.task.configs, self.target.model.vocab_size
        return grid.seconds_of_texts(
            times,
            num_kinds=len(self.task.prompts),
            num_configs=len(configs),
            num_with_model=sum(not drafts_from_text(config, vocab_size) for config in configs.values()),
        )

    def _identity(self, llm: LLM, grid: ProfileGrid) -> dict[str, Any]:
        """What the stages depend on."""
        settings = self.task.settings
        return {
            "model": settings.model,
            "fingerprint": self.target.fingerprint()[:16],
            "machine": machine_name(llm.device),
            "kernels": describe_kernels(llm),
            "dtype": str(llm.dtype).removeprefix("torch."),
            "quantization": settings.quantization,
            "load_format": settings.load_format,
            "version": forerun.__version__,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "block_size": settings.block_size,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "kernel_settings": settings.kernel_settings,
            "max_model_len": llm.max_model_len,
            "configs": {name: dict(config) for name, config in self.task.configs.items()},
            "drafters": drafter_fingerprints(self.task.configs) or None,
            "prompts_digest": {kind: digest([list(one) for one in ids]) for kind, ids in self.task.prompts.items()},
            "pools_folder": None if settings.pools_folder is None else str(settings.pools_folder),
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "num_blocks": llm.engine.parts.pool.num_blocks,
            "temperature": self.task.temperature,
            "grid": grid.to_json(),
        }

    def _rounds(self, llm: LLM, grid: ProfileGrid, stages: Stages, work: Work, *, seconds: float) -> list[RoundResult]:
        """All rounds of the sweep, which take about so many seconds: from the folder, or measured now."""
        of_round, num_jobs = seconds / (NUM_WARMUP_ROUNDS + grid.rounds), len(grid.jobs())
        kept = {number: stages.load(f"round-{number}", RoundResult.from_json) for number in range(grid.rounds)}
        missing = [number for number, found in kept.items() if found is None]
        # where no round is missing, none warms up either
        num_done = grid.rounds - len(missing) if missing else grid.rounds + NUM_WARMUP_ROUNDS
        work.add(of_round * num_done)
        if missing:
            probe, meter = self._instruments(llm)
            if meter.has_sensor:
                self.progress("the machine's power at rest")
                meter.rest(REST_SECONDS)
            self.progress("computing the contexts")
            with step_sweep(llm, grid, probe, meter, clock=self.clock) as sweep:
                sweep.warm_up(work.counted(self.progress, seconds=of_round, count=NUM_WARMUP_ROUNDS * num_jobs))
                for number in missing:
                    progress = self._with_place("round", grid.rounds, number)
                    found = sweep.run_round(number, work.counted(progress, seconds=of_round, count=num_jobs))
                    stages.keep(f"round-{number}", found.to_json())
                    kept[number] = found
        return [found for found in kept.values() if found is not None]

    def _with_place(self, name: str, count: int, number: int) -> Progress:
        return lambda line: self.progress(f"{name} {number + 1} of {count}: {line}")

    def _recording(self, grid: ProfileGrid, stages: Stages) -> Recording:
        """The target's answers: from the folder, or written now."""
        path = stages.folder / RECORDING_FILE
        if stages.get("recording") is None:
            prompts = {kind: list(ids[: grid.num_texts]) for kind, ids in self.task.prompts.items()}
            longest = max(len(ids) for of_kind in prompts.values() for ids in of_kind) + grid.max_tokens
            settings = replace(self.task.settings, max_num_seqs=RECORDED_AT_ONCE)
            llm = make_engine("recording", self.target, settings, None, num_sequences=RECORDED_AT_ONCE, longest=longest)
            found = record(
                llm,
                prompts,
                max_tokens=grid.max_tokens,
                temperatures=(self.task.temperature,),
                progress=lambda line: self.progress(f"recording {line}"),
            )
            write_recording(found, path)
            stages.keep("recording", {"num_texts": len(found.texts)})
        return read_recording(path)

    def _drafters(
        self, measurement: DrafterMeasurement, stages: Stages, on_drafter: Callable[[], object]
    ) -> dict[str, MeasuredDrafter]:
        """What each configuration's drafter costs and yields: from the folder, or measured now."""
        drafters: dict[str, MeasuredDrafter] = {}
        for name, config in self.task.configs.items():
            stage = drafter_stage(name)
            if stages.get(stage) is None:
                stages.keep(stage, measurement.measure(name, config).to_json())
            found = stages.load(stage, MeasuredDrafter.from_json)
            assert found is not None, "it was kept"
            drafters[name] = found
            on_drafter()
        return drafters

    def _profile(
        self,
        limits: Mapping[str, Any],
        rounds: Sequence[RoundResult],
        step_times: StepTimeModel,
        drafters: Mapping[str, MeasuredDrafter],
        conditions: dict[str, Any],
    ) -> Profile:
        settings = self.task.settings
        acceptance: dict[str, AcceptanceProfile] = {}
        for found in drafters.values():
            acceptance |= found.acceptance
        return Profile(
            model=settings.model,
            quantization=settings.quantization,
            version=forerun.__version__,
            gigabytes_per_second=_median([one.gigabytes_per_second for one in rounds]),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            watts=_median([one.watts for one in rounds]),
            idle_watts=_median([one.idle_watts for one in rounds]),
            step_times=step_times,
            configs={name: dict(config) for name, config in self.task.configs.items()},
            drafting={name: found.cost for name, found in drafters.items()},
            acceptance=acceptance,
            drafter_block_bytes=_known({name: found.block_bytes for name, found in drafters.items()}),
            drafter_scratch_bytes=_known({name: found.scratch_bytes for name, found in drafters.items()}),
            traces={name: self.folder / found.trace for name, found in drafters.items() if found.trace is not None},
            conditions=conditions,
            **limits,
        )

    def _conditions(self, grid: ProfileGrid, rounds: Sequence[RoundResult]) -> dict[str, Any]:
        """How it was measured, for people."""
        is_counted = any(one.watts is not None for one in rounds)
        return {
            "grid": grid.to_json(),
            "packages": describe_machine(self.target.model.device),
            "gigabytes_per_second_by_round": [
                round(one.gigabytes_per_second, 2) for one in rounds if one.gigabytes_per_second is not None
            ],
            "energy": None if is_counted else "no counter of energy can be read on this machine",
            "temperature": self.task.temperature,
        }

    def _notes(self, llm: LLM) -> dict[str, str | None]:
        """What is to be known of a profile before anybody goes by it, by the conditions that say so; None: nothing."""
        return {
            "timing": STEPS_ALONE if isinstance(llm.executor, DeviceExecutor) else None,
            "weights": MADE_UP if self.task.settings.load_format == "dummy" else None,
        }


def _median(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _known(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Those that were measured."""
    return {name: size for name, size in sizes.items() if size is not None}


def _grids_within(room: Mapping[str, int]) -> dict[str, ProfileGrid]:
    """The part of each grid that an engine has room for, by name, without those of which too little is left.

    Raises:
        ConfigError: of all of them too little is left.
    """
    found: dict[str, ProfileGrid] = {}
    refusals: list[ConfigError] = []
    for name, one in GRIDS.items():
        try:
            found[name] = one.within(**room)
        except ConfigError as error:
            refusals.append(error)
    if not found:
        raise refusals[-1]
    return found


def _limits(llm: LLM, target: LoadedTarget) -> dict[str, Any]:
    """What an engine of this model is, in the fields of `Profile`."""
    model, parts = llm.executor.model, llm.engine.parts
    decoder = model if isinstance(model, Decoder) else None
    passes = None if decoder is None else PassBytes(decoder.config, llm.dtype, weights=decoder.weight_bytes)
    heads = {} if target.ranks is None else {"num_kv_heads": target.ranks.num_kv_heads}
    block_bytes = bytes_per_block(
        [replace(spec, **heads) for spec in model.kv_specs], block_size=parts.block_size, dtype=model.dtype
    )
    return {
        "machine": machine_name(llm.device),
        "kernels": describe_kernels(llm),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "weight_bytes": None if passes is None else passes.weights,
        "kv_bytes_per_token": None if passes is None else passes.kv(1),
        "kv_cache_memory_bytes": parts.pool.num_blocks * block_bytes,
        "tensor_parallel_size": llm.settings.tensor_parallel_size,
        "device": llm.device.type,
        "kernel_settings": llm.settings.kernel_settings,
        "vocab_size": model.vocab_size,
        "num_blocks": parts.pool.num_blocks,
        "block_size": parts.block_size,
        "max_model_len": llm.max_model_len,
    }
