"""A tuning from prompts to a configuration: record, measure steps, simulate, run the best few, choose."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from forerun.bench.compare import make_engine
from forerun.bench.energy import EnergyMeter
from forerun.bench.instruments import Progress, no_progress
from forerun.bench.machine import describe_machine
from forerun.bench.profiling.traces import trace_drafts
from forerun.bench.prompts import check_room
from forerun.bench.recording import Recording, read_recording, record, write_recording
from forerun.bench.replay import drafts_from_text
from forerun.bench.tuning.estimate import Estimate
from forerun.bench.tuning.folder import TuningFolder
from forerun.bench.tuning.real_runs import Probe, RealRuns
from forerun.bench.tuning.requests import KIND, TuningWorkload
from forerun.bench.tuning.simulated_runs import SimulatedRuns
from forerun.bench.tuning.step_times import LoadTarget, measure_step_times, step_times_today
from forerun.bench.tuning.target_rows import NUM_DRAFTED, RECORDED_AT_ONCE, TargetRows, noting_drafter
from forerun.build import profile_of
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.profile import PLAIN, Profile
from forerun.plan.step_times import StepTimeModel
from forerun.plan.tuning.batch_schedule import with_schedule
from forerun.plan.tuning.candidates import Candidate, SearchSpace
from forerun.plan.tuning.choice import Objective, choose
from forerun.plan.tuning.confirmation import confirm
from forerun.plan.tuning.drive import drive
from forerun.plan.tuning.run_figures import RunFigures
from forerun.plan.tuning.screening import Screened, finalists, screen
from forerun.plan.tuning.tuning_report import TuningReport

PROBED_SHARE = 8
"""One prompt in so many is answered to probe a drafter that computes with a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """What is tuned: the engine, the workload, what may be chosen, what is to be best, and how often that is run."""

    engine: EngineSettings
    workload: TuningWorkload
    space: SearchSpace
    objective: Objective
    rounds: int = 3
    num_finalists: int = 3  # auto and plain decoding come on top

    def __post_init__(self) -> None:
        for name in ("rounds", "num_finalists"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; must be 1 or more")
        if not self.workload.prompts:
            raise ConfigError("prompts: got none; give one or more")
        if self.objective is Objective.GOODPUT and self.workload.sla is None:
            raise ConfigError("objective: got goodput without goals; give --goodput, e.g. ttft:500 tpot:50")
        if self.objective is Objective.ENERGY and not EnergyMeter.of_this_machine().has_sensor:
            raise ConfigError(
                "objective: got energy, which nothing counts on this machine; choose throughput or latency"
            )


@dataclass(slots=True)
class _Ground:
    """What is known of one format of the weights."""

    real: RealRuns
    simulated: SimulatedRuns
    step_times: StepTimeModel


@dataclass(slots=True, kw_only=True)
class Tuner:
    """Runs the stages of a tuning; each keeps what it found in the folder.

    Args:
        settings: what is tuned.
        folder: where everything is kept.
        load_target: loads the model.
        progress: is called with the state of the work.
        profile: what is known of the model in the format of weights that it names; its step times need not be
            measured then, only how fast the machine's memory is today.
    """

    settings: TuningSettings
    folder: TuningFolder
    load_target: LoadTarget
    progress: Progress = no_progress
    profile: Profile | None = None  # None: step times are measured
    _targets: dict[str | None, LoadedTarget] = field(default_factory=dict)
    _grounds: dict[str | None, _Ground] = field(default_factory=dict)

    def estimate(self) -> Estimate:
        """What the whole tuning takes at most, from a few plain steps.

        Raises:
            ForerunError: the model cannot be loaded, or a prompt does not fit.
        """
        settings, workload = self.settings, self.settings.workload
        target = self._target(settings.space.quantizations[0])
        self._check_prompts(target)
        self.progress("a few plain steps")
        llm = make_engine(PLAIN, target, settings.engine, None, num_sequences=1, longest=workload.longest)
        seconds: list[float] = []
        few = workload.warm_up(1, 32)
        drive(
            llm.engine,
            few,
            concurrency=1,
            salt="estimate",
            clock=time.perf_counter,
            wait=time.sleep,
            on_step=seconds.append,
        )
        costs, one = profile_of(target).load(), median(seconds)

        def step_seconds(num_rows: int, num_sequences: int) -> float:
            def cost(rows: int, sequences: int) -> float:
                return costs.of_rows(rows) + costs.beside_rows(sequences, sequences * workload.longest)

            return one * cost(num_rows, num_sequences) / cost(1, 1)

        return Estimate.of(
            workload,
            settings.space,
            step_seconds,
            rounds=settings.rounds,
            num_finalists=settings.num_finalists + 2,
            num_with_model=sum(
                not drafts_from_text(config, target.model.vocab_size) for config in settings.space.speculation.values()
            )
            + len(settings.space.verifiers),
        )

    def tune(self) -> TuningReport:
        """Go through all stages that are not done yet.

        Raises:
            ForerunError: a configuration or a prompt does not fit; the message names it.
        """
        settings, folder = self.settings, self.folder
        screened = folder.screened()
        if screened is None:
            screened = self._screen()
        candidates = {one.candidate.name: one.candidate for one in screened}
        chosen = finalists(screened, self._screening_objective, settings.num_finalists, plain=settings.space.plain)
        with self._stage("run"):
            rounds = confirm(
                chosen,
                self._run,
                settings.objective,
                rounds=settings.rounds,
                kept=folder.rounds(),
                on_round=folder.add_round,
            )
        own = settings.space.usual, settings.space.quantizations[0]
        choice = choose(rounds, settings.objective, lambda name: candidates[name].simplicity(*own))
        auto = next((one.name for one in chosen if one.is_auto), None)
        return TuningReport(
            model=settings.engine.model,
            machine=describe_machine(self._target(settings.space.quantizations[0]).model.device),
            load=settings.workload.load.describe(),
            objective=settings.objective,
            choice=choice,
            candidates=candidates,
            screened=screened,
            rounds=rounds,
            probed=folder.probed(),
            seconds=folder.seconds(),
            plain=settings.space.plain.name,
            auto=auto,
            sla=settings.workload.sla,
        )

    def _screen(self) -> list[Screened]:
        space = self.settings.space
        for quantization in space.quantizations:
            self._check_prompts(self._target(quantization))
        self._check_configs()
        for quantization in space.quantizations:
            self._ground(quantization)
        with self._stage("simulate"):
            screened = screen(space, self._simulate, self._screening_objective, self._with_schedule)
        probed = [name for ground in self._grounds.values() for name in ground.simulated.probed]
        self.folder.keep_screened(screened, probed)
        return screened

    def _check_prompts(self, target: LoadedTarget) -> None:
        """Refuse a prompt whose answer an engine would cut off.

        Raises:
            ConfigError: there is one.
        """
        workload, given = self.settings.workload, self.settings.engine.max_model_len
        most = target.model.max_model_len if given is None else min(given, target.model.max_model_len)
        check_room({KIND: workload.prompts}, workload.max_tokens, most=most)

    def _check_configs(self) -> None:
        """Make each drafter that computes with a model, so that what is wrong is said before anything is measured."""
        settings = self.settings
        target = self._target(settings.space.quantizations[0])
        for name, config in settings.space.speculation.items():
            if not drafts_from_text(config, target.model.vocab_size):
                self.progress(f"looking at {name}")
                longest = settings.workload.longest
                make_engine(name, target, settings.engine, config, num_sequences=1, longest=longest)

    @property
    def _screening_objective(self) -> Objective:
        """Energy is not simulated: what is quickest takes least of it, until runs say otherwise."""
        objective = self.settings.objective
        return Objective.THROUGHPUT if objective is Objective.ENERGY else objective

    def _simulate(self, candidate: Candidate) -> RunFigures:
        self.progress(f"simulating {candidate.name}")
        return self._ground(candidate.quantization).simulated.simulate(candidate)

    def _with_schedule(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """K by batch size for the best of the candidates, where the load runs several at once."""
        fixed = next((one for one in candidates if not one.is_auto), candidates[0])
        workload, ground = self.settings.workload, self._ground(fixed.quantization)
        answers = [len(text.answer_ids) for text in ground.simulated.texts]
        return with_schedule(
            candidates,
            ground.simulated.drafted,
            ground.step_times,
            max_batch_size=workload.most_running(self.settings.space.usual.max_num_seqs),
            context=fmean(map(len, workload.prompts)) + fmean(answers) / 2.0,
        )

    def _run(self, candidate: Candidate, number: int) -> RunFigures:
        self.progress(f"round {number + 1} of {self.settings.rounds}: {candidate.name}")
        return self._ground(candidate.quantization).real.run(candidate, number)

    def _target(self, quantization: str | None) -> LoadedTarget:
        if quantization not in self._targets:
            self._targets[quantization] = self.load_target(quantization)
        return self._targets[quantization]

    def _ground(self, quantization: str | None) -> _Ground:
        if quantization in self._grounds:
            return self._grounds[quantization]
        settings, workload = self.settings, self.settings.workload
        engine = replace(settings.engine, quantization=quantization)
        target = self._target(quantization)
        recording, rows = self._recorded(target, engine)
        real = RealRuns(
            target=target,
            settings=engine,
            workload=workload,
            texts=recording.texts,
            meter=EnergyMeter.of_this_machine(),
        )

        def probe(candidate: Candidate) -> Probe:
            self.progress(f"probing {candidate.name}")
            return real.probe(candidate, -(-len(workload.prompts) // PROBED_SHARE))

        def trace(candidate: Candidate) -> DraftTrace | None:
            config = candidate.speculative_config
            assert config is not None, "plain decoding drafts nothing"
            return trace_drafts(
                *(candidate.name, config, recording, target, engine),
                step_times=step_times,
                progress=self.progress,
            )

        step_times = self._step_times(target, engine)
        simulated = SimulatedRuns(
            target=target,
            settings=engine,
            workload=workload,
            texts=recording.texts,
            rows=rows,
            step_seconds=step_times.of_plan,
            trace=trace,
            probe=probe,
        )
        self._grounds[quantization] = _Ground(real, simulated, step_times)
        return self._grounds[quantization]

    def _recorded(self, target: LoadedTarget, engine: EngineSettings) -> tuple[Recording, TargetRows]:
        """The target's answers, and what it said after drafted tokens: from the folder, or written now.

        Drafts are verified meanwhile where they cannot change a text in any bit.

        Raises:
            ConfigError: what is in the folder cannot be read, or is not of all prompts.
        """
        file, workload = self.folder.recording(engine.quantization), self.settings.workload
        rows_file = self.folder.target_rows(engine.quantization)
        if not file.exists():
            with self._stage("record"):
                rows = TargetRows()
                few = replace(engine, max_num_seqs=min(len(workload.prompts), engine.max_num_seqs, RECORDED_AT_ONCE))
                noting = {"method": noting_drafter(rows), "num_speculative_tokens": NUM_DRAFTED}
                llm = make_engine(
                    "recording",
                    target,
                    few,
                    noting if target.model.is_batch_invariant else None,
                    num_sequences=few.max_num_seqs,
                    longest=workload.longest,
                )
                found = record(
                    llm,
                    {KIND: workload.prompts},
                    max_tokens=workload.max_tokens,
                    temperatures=(workload.temperature,),
                    progress=lambda line: self.progress(f"recording {line}"),
                )
                rows.save(rows_file)
                write_recording(found, file)
        recording = read_recording(file)
        if len(recording.texts) != len(workload.prompts):
            raise ConfigError(
                f"{file}: has {len(recording.texts)} texts for {len(workload.prompts)} prompts; delete it, and it is made anew"
            )
        return recording, TargetRows.load(rows_file)

    def _step_times(self, target: LoadedTarget, engine: EngineSettings) -> StepTimeModel:
        """What a step takes: from the folder, or measured now."""
        kept = self.folder.step_times(engine.quantization)
        if kept is not None:
            return kept
        with self._stage("measure_steps"):
            if self.profile is not None and self.profile.quantization == engine.quantization:
                model = step_times_today(self.profile, target)
            else:
                limits = self.settings.space.usual
                model = measure_step_times(target, engine, self.settings.workload, limits, self.progress)
        self.folder.keep_step_times(engine.quantization, model)
        return model

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.folder.spend(name, time.monotonic() - start)
