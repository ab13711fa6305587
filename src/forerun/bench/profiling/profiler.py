"""Measures a model in this process: steps in rounds, texts, drafters; each stage is kept in the profile's folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import forerun
from forerun.bench.compare import make_engine
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
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.passes import PassBytes
from forerun.bench.profiling.drafting import measure_drafting_cost, measure_live
from forerun.bench.profiling.filling import filling_config
from forerun.bench.profiling.grid import DRAFTING_TOKENS, GRIDS, NUM_WARMUP_ROUNDS, ROUGH_GRID, ProfileGrid
from forerun.bench.profiling.output import write_outputs
from forerun.bench.profiling.stages import RECORDING_FILE, Stages, begun_identity, digest, open_stages
from forerun.bench.profiling.step_sweep import RoundResult, level_rounds, step_sweep
from forerun.bench.profiling.traces import step_seconds_of_texts, trace_drafts
from forerun.bench.recording import Recording, read_recording, record, write_recording
from forerun.bench.replay import drafts_from_text
from forerun.config.kv_memory import feature_widths
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.drafters.base import KeepsKV
from forerun.errors import ConfigError
from forerun.executor.device import DeviceExecutor
from forerun.kv.cache import bytes_per_block
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.models.decoder import Decoder
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.profile import TRACES_FOLDER, Profile
from forerun.plan.step_times import DraftingCost, StepTimeModel

ROUGH_ROUND = -2  # its number; warming up is -1
REST_SECONDS = 2.0
SECONDS_TO_FINISH = 3.0  # engines are made, files written, pictures drawn
RECORDED_AT_ONCE = 8
CHECKED_TOKENS = 64  # room for these is enough to make an engine
OF_KV_MEMORY = ("model", "quantization", "block_size", "tensor_parallel_size", "gpu_memory_utilization")
"""Settings that the bytes of a KV block, and how many there may be, go by."""

STEPS_ALONE = (
    "the steps were timed one at a time, while an engine that serves on this device begins each before it has read the one "
    "before, so that the host's work takes no time of the device's: step times are upper bounds, and so are the latencies "
    "that simulations and plans compute of them"
)
"""Of an engine whose steps are the device's: what its profile does not know."""


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
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: got {self.temperature}; must be 0 or more")
        for name, config in self.configs.items():
            if not resolve_speculative(config).num_speculative_tokens:
                raise ConfigError(
                    f"configs, {name}: got num_speculative_tokens 0, which drafts nothing; leave it out, as every profile "
                    "measures steps without drafts"
                )
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
        stages = open_stages(self.folder, self._identity(llm, grid), overwrite=self.overwrite, started=started)
        num_ended = len(stages.names())
        if num_ended:
            self.announce(f"{self.folder} has {num_ended} finished stage(s); going on from there")
        of_rounds, of_texts = grid.seconds_of_rounds(times), self._text_seconds(grid, times)
        work = Work(of_rounds + of_texts, self.advance)
        rounds = self._rounds(llm, grid, stages, work, seconds=of_rounds)
        limits, timing = _limits(llm, self.target), STEPS_ALONE if isinstance(llm.executor, DeviceExecutor) else None
        del llm  # its KV memory
        part = of_texts / (1 + len(self.task.configs))
        recording = self._recording(grid, stages)
        work.add(part)
        profile = self._profile(rounds, grid, limits, recording, stages, lambda: work.add(part), timing=timing)
        if not write_outputs(profile, rounds, self.folder):
            self.announce("there is no page of plots, as matplotlib is not installed; pip install 'forerun[bench]'")
        profile.save(self.folder)  # last: a folder with profile.json is whole
        if timing is not None:
            self.announce(f"warning: {timing}")
        return profile

    def _settings_as_begun(self) -> EngineSettings:
        """The settings, with as much KV memory as the profile that was begun had, where they leave it to what is free."""
        settings = self.task.settings
        is_given = settings.num_gpu_blocks_override is not None or settings.kv_cache_memory_bytes is not None
        begun = None if self.overwrite or is_given else begun_identity(self.folder)
        if begun is None or any(begun.get(name) != getattr(settings, name) for name in OF_KV_MEMORY):
            return settings
        num_blocks = begun.get("num_blocks")
        return replace(settings, num_gpu_blocks_override=num_blocks) if isinstance(num_blocks, int) else settings

    def _check_configs(self) -> None:
        """Make each drafter that is still to be measured, so that what is wrong is said before hours of measuring."""
        begun = Stages(self.folder)
        for name, config in self.task.configs.items():
            if self.overwrite or not begun.path(_drafter_stage(name)).exists():
                self.progress(f"looking at {name}")
                make_engine(name, self.target, self.task.settings, config, num_sequences=1, longest=CHECKED_TOKENS)

    def _check_prompts(self, grid: ProfileGrid) -> None:
        """Refuse prompts whose answers the model has no room for, before hours of measuring too."""
        room, num_tokens = self.target.model.max_model_len, max(grid.max_tokens, DRAFTING_TOKENS)
        for kind, prompts in self.task.prompts.items():
            for number, ids in enumerate(prompts[: grid.num_texts], 1):
                if len(ids) + num_tokens > room:
                    raise ConfigError(
                        f"prompts: prompt {number} of {kind!r} has {len(ids)} tokens, and its answer {num_tokens}; the model "
                        f"allows at most {room} in sum: shorten it or leave it out, or ask for fewer max_tokens"
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
        task, room = self.task, self._room(llm)
        begun = None if self.overwrite or task.grid is not None else begun_identity(self.folder)
        if begun is not None:
            try:
                return ProfileGrid.from_json(begun["grid"])
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self.folder}: the grid of the profile that was begun is damaged ({error!r}); give another folder, or "
                    "--overwrite"
                ) from None
        if task.grid is not None:
            grid = task.grid.within(**room)
            self.announce(f"about {self._estimate(grid, times):.0f} s")
            self._announce_left_out(task.grid, grid)
            return grid
        grids = _grids_within(room)
        budget = float("inf") if task.budget_seconds is None else task.budget_seconds
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
            "machine": machine_name(llm),
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
            "prompts_digest": {kind: digest([list(one) for one in ids]) for kind, ids in self.task.prompts.items()},
            "pools_folder": None if settings.pools_folder is None else str(settings.pools_folder),
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "num_blocks": llm.engine.parts.pool.num_blocks,
            "temperature": self.task.temperature,
            "grid": grid.to_json(),
        }

    def _rounds(self, llm: LLM, grid: ProfileGrid, stages: Stages, work: Work, *, seconds: float) -> list[RoundResult]:
        """All rounds of the sweep, which take about so many seconds: from the folder, or measured now."""
        of_round, num_jobs = seconds / (NUM_WARMUP_ROUNDS + grid.rounds), grid.num_measurements
        kept = {number: stages.load(f"round-{number}", RoundResult.from_json) for number in range(grid.rounds)}
        missing = [number for number, found in kept.items() if found is None]
        work.add(of_round * (grid.rounds - len(missing) if missing else grid.rounds + NUM_WARMUP_ROUNDS))
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

    def _profile(
        self,
        rounds: Sequence[RoundResult],
        grid: ProfileGrid,
        limits: dict[str, Any],
        recording: Recording,
        stages: Stages,
        on_drafter: Callable[[], None],
        *,
        timing: str | None,
    ) -> Profile:
        drafting: dict[str, DraftingCost] = {}
        acceptance: dict[str, AcceptanceProfile] = {}
        traces: dict[str, Path] = {}
        block_bytes: dict[str, int] = {}
        step_times = StepTimeModel.fit(level_rounds(rounds))
        for name, config in self.task.configs.items():
            stage = _drafter_stage(name)
            if stages.get(stage) is None:
                stages.keep(stage, self._measure_drafter(name, config, recording, step_times))
            found = stages.load(stage, _MeasuredDrafter.from_json)
            assert found is not None, "it was kept"
            drafting[name] = found.cost
            acceptance |= found.acceptance
            if found.block_bytes is not None:
                block_bytes[name] = found.block_bytes
            if found.trace is not None:
                traces[name] = self.folder / found.trace
            on_drafter()
        speeds = [one.gigabytes_per_second for one in rounds if one.gigabytes_per_second is not None]
        watts = [one.watts for one in rounds if one.watts is not None]
        idle_watts = [one.idle_watts for one in rounds if one.idle_watts is not None]
        return Profile(
            model=self.task.settings.model,
            quantization=self.task.settings.quantization,
            version=forerun.__version__,
            gigabytes_per_second=statistics.median(speeds),
            max_num_seqs=self.task.settings.max_num_seqs,
            max_num_batched_tokens=self.task.settings.max_num_batched_tokens,
            watts=statistics.median(watts) if watts else None,
            idle_watts=statistics.median(idle_watts) if idle_watts else None,
            step_times=step_times,
            configs={name: dict(config) for name, config in self.task.configs.items()},
            drafting=drafting,
            acceptance=acceptance,
            drafter_block_bytes=block_bytes,
            traces=traces,
            conditions={
                "grid": grid.to_json(),
                "packages": describe_machine(self.target.model.device),
                "gigabytes_per_second_by_round": [round(speed, 2) for speed in speeds],
                "timing": timing,
                "energy": None if watts else "no counter of energy can be read on this machine",
                "temperature": self.task.temperature,
                "num_texts": len(recording.texts),
                "seconds": round(stages.seconds, 1),
            },
            **limits,
        )

    def _measure_drafter(
        self,
        name: str,
        config: Mapping[str, Any],
        recording: Recording,
        step_times: StepTimeModel,
    ) -> dict[str, Any]:
        """A drafter's cost in an engine; its acceptance by its trace, or where texts do not decide it, in an engine."""
        settings, texts = self.task.settings, recording.texts
        running = replace(settings, pools_folder=None)  # where these answers would take the place of users'
        trace = trace_drafts(
            *(name, config, recording, self.target, settings),
            step_seconds=step_seconds_of_texts(step_times, recording),
            progress=self.progress,
        )
        cost = measure_drafting_cost(
            name, self.target, running, config, texts, step_times, progress=self.progress, clock=self.clock
        )
        kinds = list(recording.by_kind)
        if trace is not None:
            where = f"{TRACES_FOLDER}/{digest(name)}.npz"
            (self.folder / TRACES_FOLDER).mkdir(exist_ok=True)
            trace.save(self.folder / where)
            acceptance = {name: _acceptance(trace)} | _by_kind(name, kinds, trace)
        else:
            where = None
            num_tokens = recording.info.max_tokens
            live = measure_live(
                name, self.target, running, config, texts, num_tokens=num_tokens, progress=self.progress
            )
            acceptance = {name: live.acceptance()}
            acceptance |= {f"{name}/{kind}": live.acceptance(kind) for kind in kinds}
        return {
            "cost": cost.to_json(),
            "block_bytes": self._block_bytes(name, config),
            "acceptance": {key: one.to_json() for key, one in acceptance.items()},
            "trace": where,
        }

    def _block_bytes(self, name: str, config: Mapping[str, Any]) -> int:
        """What a drafter adds to each KV block: its own KV, and the target's features that it reads."""
        llm = make_engine(name, self.target, self.task.settings, config, num_sequences=1, longest=CHECKED_TOKENS)
        drafter, model = llm.executor.drafting.drafter, self.target.model
        features = bytes_per_block(
            [],
            block_size=self.task.settings.block_size,
            dtype=model.dtype,
            feature_widths=feature_widths(model, drafter.needs),
        )
        return features + (drafter.kv_bytes_per_block if isinstance(drafter, KeepsKV) else 0)


class _MeasuredDrafter(NamedTuple):
    """What was measured of a drafter: its cost, its acceptance by class of prompts, its trace's place in the folder.

    `block_bytes` is what it adds to each KV block; None where an older forerun measured it.
    """

    cost: DraftingCost
    acceptance: dict[str, AcceptanceProfile]
    trace: str | None
    block_bytes: int | None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> _MeasuredDrafter:
        """What `Profiler` kept."""
        acceptance = {key: AcceptanceProfile.from_json(one) for key, one in record["acceptance"].items()}
        return cls(DraftingCost.from_json(record["cost"]), acceptance, record["trace"], record.get("block_bytes"))


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


def _drafter_stage(name: str) -> str:
    """By the configuration's name, in letters that any file may have: their order may be another when a profile goes on."""
    return f"drafter-{digest(name)}"


def _acceptance(trace: DraftTrace, kind: str | None = None) -> AcceptanceProfile:
    """What stands of drafts as long as the answers can judge: these must go on for two tokens more."""
    longest = max(trace.num_answer_tokens(text) for text in trace.texts_of(kind))
    return trace.acceptance(min(trace.num_speculative_tokens, max(1, longest - 2)), kind=kind)


def _by_kind(name: str, kinds: Sequence[str], trace: DraftTrace) -> dict[str, AcceptanceProfile]:
    """Acceptance by class of prompts; classes whose texts are too short for a draft have none."""
    found = {}
    for kind in kinds:
        try:
            found[f"{name}/{kind}"] = _acceptance(trace, kind)
        except ConfigError:
            continue
    return found


def machine_name(llm: LLM) -> str:
    """The machine, without the versions of what runs on it: GPU or processor, and cores."""
    return describe_machine(llm.device).partition("; ")[0]


def _limits(llm: LLM, target: LoadedTarget) -> dict[str, Any]:
    """What an engine of this model is, in the fields of `Profile`."""
    model, parts = llm.executor.model, llm.engine.parts
    heads = {} if target.ranks is None else {"num_kv_heads": target.ranks.num_kv_heads}
    block_bytes = bytes_per_block(
        [replace(spec, **heads) for spec in model.kv_specs], block_size=parts.block_size, dtype=model.dtype
    )
    config = model.config if isinstance(model, Decoder) else None
    kv_bytes = None
    if isinstance(model, Decoder) and config is not None:
        kv_bytes = PassBytes(config, llm.dtype, weights=model.weight_bytes).kv(1)
    return {
        "machine": machine_name(llm),
        "kernels": describe_kernels(llm),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "weight_bytes": model.weight_bytes if isinstance(model, Decoder) else None,
        "kv_bytes_per_token": kv_bytes,
        "kv_cache_memory_bytes": parts.pool.num_blocks * block_bytes,
        "tensor_parallel_size": llm.settings.tensor_parallel_size,
        "device": llm.device.type,
        "kernel_settings": llm.settings.kernel_settings,
        "vocab_size": model.vocab_size,
        "num_blocks": parts.pool.num_blocks,
        "block_size": parts.block_size,
        "max_model_len": llm.max_model_len,
    }
