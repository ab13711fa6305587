"""Simulates configurations on recorded answers: the real scheduler, KV accounting, drafters and control, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from forerun.bench.compare import sized_settings
from forerun.bench.recording import RecordedText
from forerun.bench.tuning.real_runs import Probe
from forerun.bench.tuning.replayed_drafting import ProbedDraftSeconds, ReplayedDrafting
from forerun.bench.tuning.requests import TuningWorkload
from forerun.bench.tuning.target_rows import TargetRows
from forerun.build import profile_of, target_info
from forerun.config.kv_memory import plan_kv
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig, resolve_speculative
from forerun.core.step import StepPlan
from forerun.drafters.base import Drafter, computes_with_a_model
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.simulation import SimulationSettings, simulated_engine
from forerun.engine.speculation import SpeculationControl
from forerun.errors import ForerunError
from forerun.executor.simulated import DraftSeconds, VirtualClock, drafting_is_free
from forerun.executor.simulated_text import ConditionalAcceptance, Drafting, HashedTexts, RecordedTexts
from forerun.executor.simulated_text import RecordedText as SimulatedText
from forerun.models.base import LoadedTarget
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.simulation.profiled import TracedDrafting
from forerun.plan.tuning.batch_schedule import DraftingFigures
from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.drive import drive
from forerun.plan.tuning.run_figures import RunFigures

SALT = "simulated"


@dataclass(slots=True, kw_only=True)
class SimulatedRuns:
    """Simulations over one target's recorded answers.

    Args:
        target: the model, in one format of its weights; nothing is computed with it.
        settings: of all engines, as for real runs.
        workload: what is served.
        texts: the recorded answers, one per prompt.
        rows: what the target said after drafted tokens, for drafters that learn from it.
        step_seconds: what a step takes, drafting left out.
        trace: asks a drafter that computes with a model for its drafts at every place of the texts; None where the texts
            do not decide them, or what of them stands.
        probe: makes a short real run, for the time of such a drafter, and where it has no trace for its acceptance.
    """

    target: LoadedTarget
    settings: EngineSettings
    workload: TuningWorkload
    texts: Sequence[RecordedText]
    rows: TargetRows
    step_seconds: Callable[[StepPlan], float]
    trace: Callable[[Candidate], DraftTrace | None]
    probe: Callable[[Candidate], Probe]
    probed: set[str] = field(default_factory=set)  # names of the candidates that were
    drafted: dict[str, DraftingFigures] = field(default_factory=dict)  # by the names of those that drafted
    # of those that were probed, by speculative_config, whatever the limits
    _found: dict[str, tuple[Drafting, DraftSeconds]] = field(default_factory=dict)

    def simulate(self, candidate: Candidate) -> RunFigures:
        """One run of all requests.

        Raises:
            ForerunError: the configuration (named in the message) or a request does not fit.
        """
        try:
            speculative = resolve_speculative(candidate.speculative_config)
            settings = self._settings(candidate, speculative)
            drafter = speculative.drafter.build(target_info(settings, self.target, speculative))
            drafting, draft_seconds = self._drafting(candidate, speculative, drafter)
            num_blocks = plan_kv(settings, self.target.model, drafter).num_blocks
        except ForerunError as error:
            raise type(error)(f"{candidate.name}: {error}") from error
        vocab_size = self.target.model.vocab_size
        by_seed = dict(enumerate(self.texts))
        replayed = drafting if isinstance(drafting, ReplayedDrafting) else None
        clock = VirtualClock()

        drafting_seconds = 0.0

        def counted_draft_seconds(num_sequences: int, num_draft_tokens: int) -> float:
            nonlocal drafting_seconds
            seconds = draft_seconds(num_sequences, num_draft_tokens)
            drafting_seconds += seconds
            return seconds

        def step_seconds(plan: StepPlan) -> float:
            seconds = self.step_seconds(plan)
            if replayed is not None:
                replayed.note_plan(plan, seconds)
            return seconds

        engine = simulated_engine(
            SimulationSettings(
                step_seconds=step_seconds,
                draft_seconds=counted_draft_seconds if drafting is not None else draft_seconds,
                drafting=drafting,
                texts=RecordedTexts(
                    by_seed={
                        seed: SimulatedText(len(text.prompt_ids), text.answer_ids) for seed, text in by_seed.items()
                    },
                    others=HashedTexts(vocab_size),
                ),
                vocab_size=vocab_size,
                num_blocks=num_blocks,
                block_size=self.settings.block_size,
                max_model_len=self.workload.longest,
                max_num_seqs=candidate.limits.max_num_seqs,
                max_num_batched_tokens=candidate.limits.max_num_batched_tokens,
                enable_prefix_caching=self.settings.enable_prefix_caching,
            ),
            self._control(speculative),
            clock=clock,
        )
        done = drive(
            engine,
            self.workload.recorded_requests(self.texts),
            concurrency=self.workload.load.concurrency,
            salt=SALT,
            clock=clock,
            wait=clock.advance,
            on_end=replayed.end if replayed is not None else lambda _: None,
        )
        counts = engine.stats.speculation
        if drafting is not None and counts.num_steps:
            self.drafted[candidate.name] = DraftingFigures(
                tokens_per_step=1.0 + counts.num_accepted_tokens / counts.num_steps,
                draft_tokens_per_step=counts.num_draft_tokens / counts.num_steps,
                drafting_seconds_per_step=drafting_seconds / counts.num_steps,
            )
        return RunFigures.of(
            done.times,
            done.seconds,
            sla=self.workload.sla,
            acceptance_length=counts.acceptance_length,
        )

    def _settings(self, candidate: Candidate, speculative: SpeculativeConfig) -> EngineSettings:
        """Those of the engine that a real run would have."""
        limits = candidate.limits
        return sized_settings(
            replace(
                self.settings,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
            ),
            speculative,
            num_sequences=self.workload.most_running(limits.max_num_seqs),
            longest=self.workload.longest,
        )

    def _drafting(
        self, candidate: Candidate, speculative: SpeculativeConfig, drafter: Drafter
    ) -> tuple[Drafting | None, DraftSeconds]:
        """What is drafted, and how long that takes."""
        if not speculative.num_speculative_tokens:
            return None, drafting_is_free
        if self._is_replayable(speculative, drafter):
            guarded = GuardedDrafter(drafter, vocab_size=self.target.model.vocab_size, source=speculative.method)
            replayed = ReplayedDrafting(guarded, dict(enumerate(self.texts)), rows=self.rows, salt=SALT)
            return replayed, replayed
        self.probed.add(candidate.name)
        key = repr(candidate.speculative_config)
        if key not in self._found:
            probe, trace = self.probe(candidate), self.trace(candidate)
            traced: Drafting = ConditionalAcceptance(probe.conditional_acceptance)
            if trace is not None:
                traced = TracedDrafting.repeating(trace)
            self._found[key] = traced, ProbedDraftSeconds(probe.seconds_per_draft)
        return self._found[key]

    def _is_replayable(self, speculative: SpeculativeConfig, drafter: Drafter) -> bool:
        """Whether the drafter goes by the text alone, and the text alone decides what stands."""
        return speculative.goes_by_text(self.workload.temperature) and not computes_with_a_model(drafter)

    def _control(self, speculative: SpeculativeConfig) -> SpeculationControl:
        """A fresh control; an adaptive one begins with the costs that an engine would begin with, and keeps none."""
        return speculative.control(replace(profile_of(self.target), keeps_new=False))
