"""Runs configurations for real, in this process, over the weights of one loaded target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forerun.bench.compare import make_engine
from forerun.bench.energy import EnergyMeter
from forerun.bench.recording import RecordedText
from forerun.bench.tuning.requests import TuningWorkload
from forerun.config.settings import EngineSettings
from forerun.core.stats import SpeculationStats
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.drive import Drive, drive
from forerun.plan.tuning.run_figures import RunFigures

NUM_WARMUP_PROMPTS, NUM_WARMUP_TOKENS = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a short real run showed of a drafter that computes with a model, or whose verifier does not go by the text.

    Of a step in which nothing was drafted nothing stood.
    """

    conditional_acceptance: tuple[float, ...]  # by position, given that all before it stood
    seconds_per_draft: float  # of one sequence, after one step


@dataclass(slots=True, kw_only=True)
class RealRuns:
    """Engines over one target, each made and warmed up at its first run and kept for the next one.

    A run has a cache salt of its own: it finds neither KV nor what a drafter remembers of earlier runs.

    Args:
        target: the model, in one format of its weights.
        settings: of all engines; the candidate gives the limits of a step, the workload the longest sequence.
        workload: what is served.
        texts: the recorded answers; those of a run are compared with them.
        meter: counts energy where it can.
    """

    target: LoadedTarget
    settings: EngineSettings
    workload: TuningWorkload
    texts: Sequence[RecordedText]
    meter: EnergyMeter
    _engines: dict[str, LLM] = field(default_factory=dict)
    _num_runs: int = 0

    def run(self, candidate: Candidate, number: int) -> RunFigures:
        """One run of all requests, in round `number`.

        Raises:
            ForerunError: the configuration (named in the message) or a request does not fit.
        """
        llm = self.engine(candidate)
        llm.reset_stats()
        with self.meter:
            done = self._drive(llm, self.workload, salt=f"round {number}, {self._next_number()}")
        return RunFigures.of(
            done.times,
            done.seconds,
            sla=self.workload.sla,
            joules=self.meter.energy.joules,
            acceptance_length=llm.stats.speculation.acceptance_length,
            num_differing=sum(one != text.answer_ids for one, text in zip(done.answers, self.texts, strict=True)),
        )

    def probe(self, candidate: Candidate, num_prompts: int) -> Probe:
        """A run of the first prompts, for the acceptance and the time of a drafter."""
        llm = self.engine(candidate)
        llm.reset_stats()
        few = replace(self.workload, prompts=self.workload.prompts[:num_prompts])
        self._drive(llm, few, salt=f"probe {self._next_number()}")
        counts: SpeculationStats = llm.stats.speculation
        num_steps, stood = max(1, counts.num_steps), counts.accepted_per_position or [0]
        return Probe(
            conditional_acceptance=AcceptanceProfile.of_counts(candidate.name, num_steps, stood).conditional,
            seconds_per_draft=llm.stats.times.draft / num_steps,
        )

    def engine(self, candidate: Candidate) -> LLM:
        """The candidate's engine, warm."""
        if candidate.name not in self._engines:
            limits = candidate.limits
            llm = make_engine(
                candidate.name,
                self.target,
                replace(
                    self.settings,
                    max_num_seqs=limits.max_num_seqs,
                    max_num_batched_tokens=limits.max_num_batched_tokens,
                    quantization=candidate.quantization,
                ),
                candidate.speculative_config,
                num_sequences=self.workload.most_running(limits.max_num_seqs),
                longest=self.workload.longest,
            )
            drive(
                llm.engine,
                self.workload.warm_up(NUM_WARMUP_PROMPTS, NUM_WARMUP_TOKENS),
                concurrency=NUM_WARMUP_PROMPTS,
                salt="warm-up",
                clock=time.perf_counter,
                wait=time.sleep,
            )
            self._engines[candidate.name] = llm
        return self._engines[candidate.name]

    def _drive(self, llm: LLM, workload: TuningWorkload, *, salt: str) -> Drive:
        return drive(
            llm.engine,
            workload.requests(),
            concurrency=workload.load.concurrency,
            salt=salt,
            clock=time.perf_counter,
            wait=time.sleep,
        )

    def _next_number(self) -> int:
        self._num_runs += 1
        return self._num_runs
