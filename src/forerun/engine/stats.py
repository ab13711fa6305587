"""The engine's counters: metrics with vLLM's names, and a log line every ten seconds in its words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from forerun.core.stats import PHASES, ExecutorInfo, SpeculationStats, StepTimes
from forerun.engine.regret import ChoiceAccount, SpeculationReport

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    value: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that goes up and down."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vector:
    """An array of counters, one per position."""

    name: str
    values: list[int]
    labels: dict[str, str] = field(default_factory=dict)


Metric = Counter | Gauge | Vector
"""A named measurement, in the shape of vLLM's `LLM.get_metrics`."""


@dataclass(slots=True, kw_only=True)
class EngineState:
    """What the scheduler and the block pool look like now, and what they have counted since the statistics were reset."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of blocks in use, 0 to 1
    num_blocks: int = 0
    block_size: int = 0  # tokens of a block
    num_preemptions: int = 0
    num_queried_tokens: int = 0  # looked up in the prefix cache
    num_cached_tokens: int = 0  # of these, found
    num_speculative_tokens: int = 0  # K
    choices: ChoiceAccount | None = None  # of the control; None where it chooses nothing
    executor: ExecutorInfo | None = None  # None: nobody has said

    @property
    def report(self) -> SpeculationReport | None:
        """What the control's choices were worth; None where it chooses nothing, or does not know yet."""
        return None if self.choices is None else self.choices.report()


@dataclass(slots=True)
class EngineStats:
    """Sums over the engine's life (or since the last reset)."""

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    times: StepTimes = field(default_factory=StepTimes)
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_failed_drafts: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason

    def metrics(self, state: EngineState) -> list[Metric]:
        """All counters and gauges, under vLLM's names where vLLM has the metric; K numbers per vector."""
        spec = self.speculation
        unreached = [0] * (state.num_speculative_tokens - len(spec.reached_per_position))
        return [
            Gauge("vllm:num_requests_running", state.num_running),
            Gauge("vllm:num_requests_waiting", state.num_waiting),
            Gauge("vllm:kv_cache_usage_perc", state.kv_usage),
            Gauge(
                "vllm:cache_config_info",
                1,
                {"block_size": str(state.block_size), "num_gpu_blocks": str(state.num_blocks)},
            ),
            Counter("vllm:prompt_tokens", self.num_prompt_tokens),
            Counter("vllm:generation_tokens", self.num_generation_tokens),
            Counter("vllm:prefix_cache_queries", state.num_queried_tokens),
            Counter("vllm:prefix_cache_hits", state.num_cached_tokens),
            Counter("vllm:num_preemptions", state.num_preemptions),
            *(Counter("vllm:request_success", n, {"finished_reason": r}) for r, n in sorted(self.num_finished.items())),
            Counter("vllm:spec_decode_num_drafts", spec.num_drafts),
            Counter("vllm:spec_decode_num_draft_tokens", spec.num_draft_tokens),
            Counter("vllm:spec_decode_num_accepted_tokens", spec.num_accepted_tokens),
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", spec.accepted_per_position + unreached),
            Vector("forerun:spec_decode_num_reached_per_pos", spec.reached_per_position + unreached),
            *(
                Counter(f"forerun:spec_decode_{name}_by_drafter", getattr(counts, name), {"drafter": drafter})
                for drafter, counts in sorted(spec.by_drafter.items())
                for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            ),
            *_report_metrics(state.report),
            Counter("forerun:num_verified_steps", spec.num_steps),
            Counter("forerun:num_failed_drafts", self.num_failed_drafts),
            *(Gauge("forerun:phase_seconds", getattr(self.times, phase), {"phase": phase}) for phase in PHASES),
            *_executor_metrics(state.executor),
            Gauge("forerun:device_idle_seconds", self.times.idle),
            Counter("forerun:graph_steps", self.times.num_replayed_steps),
            Counter("forerun:eager_steps", self.times.num_steps - self.times.num_replayed_steps),
            Counter("forerun:num_steps", self.times.num_steps),
        ]


def _executor_metrics(executor: ExecutorInfo | None) -> list[Metric]:
    """What computes, in labels."""
    if executor is None:
        return []
    labels = {"executor": executor.name, "device": executor.device, "kernels": executor.kernels}
    return [Gauge("forerun:executor_info", 1, labels)]


def _report_metrics(report: SpeculationReport | None) -> list[Metric]:
    """What the control's choices were worth."""
    if report is None:
        return []
    return [
        Gauge("forerun:spec_decode_tokens_per_second", report.tokens_per_second),
        Gauge("forerun:spec_decode_plain_tokens_per_second", report.plain_tokens_per_second),
        Gauge("forerun:spec_decode_regret", report.regret),
        Gauge("forerun:spec_decode_best_static_length", report.best_static_length),
    ]


class StatsLog:
    """Writes what happened since the last line to the logger; a line is due every ten seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_time = clock()
        self._last_spec = SpeculationStats()
        self._last_prompt = 0
        self._last_generated = 0
        self._last_times = StepTimes()
        self._last_choices: ChoiceAccount | None = None

    @property
    def is_due(self) -> bool:
        """Whether the interval has passed since the last line."""
        return self._clock() - self._last_time >= LOG_INTERVAL_S

    def write(self, stats: EngineStats, state: EngineState) -> None:
        """Write a line on the time since the last one."""
        now = self._clock()
        seconds = now - self._last_time
        hit_rate = state.num_cached_tokens / max(1, state.num_queried_tokens)
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            (stats.num_prompt_tokens - self._last_prompt) / seconds,
            (stats.num_generation_tokens - self._last_generated) / seconds,
            state.num_running,
            state.num_waiting,
            100 * state.kv_usage,
            100 * hit_rate,
        )
        if state.executor is not None:
            logger.info("%s", executor_line(state.executor, stats.times.since(self._last_times)))
        if stats.speculation.num_drafts > self._last_spec.num_drafts:
            recent = stats.speculation.since(self._last_spec)
            logger.info("%s", speculation_line(recent, seconds))
            if recent.by_drafter:
                logger.info("%s", drafters_line(recent))
        if state.choices is not None and (report := state.choices.since(self._last_choices).report()) is not None:
            logger.info("%s", report_line(report))
        self._last_time = now
        self._last_choices = state.choices
        self._last_prompt = stats.num_prompt_tokens
        self._last_generated = stats.num_generation_tokens
        self._last_spec = stats.speculation.copy()
        self._last_times = replace(stats.times)


def executor_line(executor: ExecutorInfo, times: StepTimes) -> str:
    """What computes, how many of some steps by CUDA graphs, and how long a step its device had nothing to do, where that is measured."""
    line = f"Executor: {executor}"
    if times.num_replayed_steps:
        line += f", CUDA graphs: {times.num_replayed_steps} of {times.num_steps} steps"
    if times.idle > 0 and times.num_steps:
        line += f", Device idle: {1e3 * times.idle / times.num_steps:.3f} ms per step"
    return line


def speculation_line(stats: SpeculationStats, seconds: float) -> str:
    """The log line of vLLM, word for word; its mean acceptance length counts steps with a draft."""
    per_position = ", ".join(f"{rate:.3f}" for rate in stats.acceptance_per_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + stats.num_accepted_tokens / stats.num_drafts:.2f}, "
        f"Accepted throughput: {stats.num_accepted_tokens / seconds:.2f} tokens/s, "
        f"Drafted throughput: {stats.num_draft_tokens / seconds:.2f} tokens/s, "
        f"Accepted: {stats.num_accepted_tokens} tokens, Drafted: {stats.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {per_position}, "
        f"Avg Draft acceptance rate: {100 * stats.num_accepted_tokens / stats.num_draft_tokens:.1f}%"
    )


def drafters_line(stats: SpeculationStats) -> str:
    """What each drafter has cost and earned: rows and tokens a step of one sequence, and its drafts."""
    drafted, gained = stats.drafted_per_step, stats.gained_per_step
    earned = (
        f"{drafter} {drafted[drafter]:.2f} rows and +{gained[drafter]:.2f} tokens per step "
        f"({counts.num_accepted_tokens} of {counts.num_draft_tokens} tokens in {counts.num_drafts} drafts)"
        for drafter, counts in sorted(stats.by_drafter.items())
        if counts.num_drafts
    )
    return f"Drafters: {', '.join(earned)}"


def report_line(report: SpeculationReport) -> str:
    """What the control's choices were worth, by the costs that it has fitted."""
    plain = report.plain_tokens_per_second
    speed_up = f" ({report.tokens_per_second / plain:.2f}x)" if plain else ""
    return (
        f"Estimated generation throughput: {report.tokens_per_second:.1f} tokens/s with drafts, "
        f"{plain:.1f} tokens/s without{speed_up}, "
        f"Regret against {report.best_static_length} draft tokens in every step: {100 * report.regret:.1f}%"
    )
