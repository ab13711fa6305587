"""What a tuning has found: the configuration, the runs behind it, the reasons, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

from forerun.plan.sla import Sla
from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.choice import TIE, Choice, Criterion, Objective, Rounds, relative_values
from forerun.plan.tuning.pareto import pareto_front
from forerun.plan.tuning.run_figures import RunFigures
from forerun.plan.tuning.screening import Screened, simulation_errors

VERSION = 1

NEARLY = 1.03
"""A gain over auto up to which it is worth saying that auto would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The result of a tuning.

    `rounds` are the real runs, `screened` the simulations, best first. `machine` describes where it ran, `load` what was
    offered. `plain` and `auto` name these two configurations among the runs, where they are.
    """

    model: str
    machine: str
    load: str
    objective: Objective
    choice: Choice
    candidates: Mapping[str, Candidate]
    screened: Sequence[Screened]
    rounds: Rounds
    probed: Sequence[str]
    seconds: Mapping[str, float]
    plain: str | None
    auto: str | None
    sla: Sla | None = None

    @property
    def best(self) -> Candidate:
        """The configuration that was chosen."""
        return self.candidates[self.choice.name]

    @property
    def medians(self) -> dict[str, RunFigures]:
        """Each run configuration's run of median throughput or, of an even number, the lower one of the middle two."""
        return {
            name: sorted(runs, key=lambda run: run.tokens_per_second)[(len(runs) - 1) // 2]
            for name, runs in self.rounds.items()
        }

    @property
    def num_differing(self) -> dict[str, int]:
        """By configuration, the most answers of a run that are not the recorded ones."""
        return {name: max(run.num_differing for run in runs) for name, runs in self.rounds.items()}

    def gain_over(self, name: str) -> float | None:
        """The median over shared rounds of the best one's value over another's, by the first criterion; None without runs."""
        return self._gain(name, self.objective.criteria[0])

    def _gain(self, name: str, criterion: Criterion) -> float | None:
        if name not in self.rounds:
            return None
        values = relative_values(self.rounds, criterion)
        ratios = [a / b for a, b in zip(values[self.choice.name], values[name], strict=False) if b]
        return median(ratios) if ratios else None

    def front(self) -> list[str]:
        """Names of the runs that none beats in latency, throughput and, where it is counted, energy."""
        found = self.medians
        has_energy = all(run.joules_per_token is not None for run in found.values())

        def costs(name: str) -> list[float]:
            run = found[name]
            both = [run.e2el.mean, -run.tokens_per_second]
            return [*both, run.joules_per_token or 0.0] if has_energy else both

        return pareto_front(list(found), costs)

    def shown_attainment(self, run: RunFigures) -> str:
        """The share of a run's requests that kept all goals, in as many digits as tell whether they are enough."""
        kept, wanted = run.attainment or 0.0, 0.0 if self.sla is None else self.sla.attainment
        digits = next(n for n in count() if (round(kept, n + 2) >= wanted) == (kept >= wanted))
        return f"{round(kept, digits + 2):.{digits}%}"

    def reasons(self) -> list[str]:
        """Why this configuration, in sentences."""
        best, criterion = self.choice.name, self.objective.criteria[0].name
        runs = self.medians[best]
        lines = [
            f"Best for {criterion} at {self.load}: {best}.",
            f"{runs.tokens_per_second:.1f} tokens/s, {1e3 * runs.e2el.mean:.0f} ms per request (mean), "
            f"{1e3 * runs.tpot.mean:.2f} ms per token, {1e3 * runs.ttft.mean:.0f} ms to the first one; "
            f"{len(self.rounds[best])} run(s) of {runs.num_requests} requests.",
        ]
        if self.sla is not None:
            lines.append(self._goals_kept(runs, self.sla))
        lines += self._gains(criterion)
        others = [name for name in self.choice.tied if name != best]
        if others:
            lines.append(f"Within {TIE:.0%} of the best, so the simplest was taken: {', '.join(others)}.")
        if self.auto == best:
            lines.append(
                "auto has nothing to set: it chooses drafts step by step, and follows the load where that changes."
            )
        elif (over_auto := self._gain_over_auto()) is not None and over_auto <= NEARLY:
            stands = f"only {over_auto - 1:.1%} behind" if over_auto > 1.0 else "as good"
            lines.append(f"auto is {stands} and has nothing to set: take it where load or prompts vary.")
        lines.append(self._how_sure())
        lines += [
            f"{name}: {count} of {runs.num_requests} answers are not the recorded ones."
            for name, count in self.num_differing.items()
            if count
        ]
        return lines

    def _goals_kept(self, runs: RunFigures, sla: Sla) -> str:
        kept, wanted = self.shown_attainment(runs), f"{100 * sla.attainment:g}%"
        if (runs.attainment or 0.0) >= sla.attainment:
            return f"{kept} of the requests keep all goals; {wanted} were to."
        most = max(self.medians.values(), key=lambda run: run.attainment or 0.0)
        return (
            f"NOT ENOUGH: {kept} of the requests keep all goals, {wanted} were to; of all that was run the "
            f"most is {self.shown_attainment(most)}. Lower the load, or add replicas (forerun plan)."
        )

    def _gain_over_auto(self) -> float | None:
        """By the criterion in which auto is farthest behind; None without runs of it."""
        found = [] if self.auto is None else [self._gain(self.auto, one) for one in self.objective.criteria]
        return max((gain for gain in found if gain is not None), default=None)

    def _gains(self, criterion: str) -> list[str]:
        others = [name for name in (self.plain, self.auto) if name is not None and name != self.choice.name]
        gains = {name: self.gain_over(name) for name in others}
        return [
            f"{criterion}: {gain:.2f} times that of {name}, round by round (median)."
            for name, gain in gains.items()
            if gain is not None
        ]

    def _how_sure(self) -> str:
        probed = f", {len(self.probed)} of them from a short run each" if self.probed else ""
        text = f"{len(self.screened)} configurations were simulated{probed}, {len(self.rounds)} run"
        if self.plain is None:
            return f"{text}."
        medians = self.medians
        of_plain = simulation_errors(self.screened, {self.plain: medians[self.plain]})[self.plain][0]
        errors = simulation_errors(self.screened, medians)
        worst = max((abs((1.0 + one) / (1.0 + of_plain) - 1.0) for one, _ in errors.values()), default=0.0)
        return (
            f"{text}; their throughput over plain decoding's had been predicted within {worst:.0%}, plain decoding's "
            f"own {of_plain:+.0%} off (the machine's speed when steps were measured, and when it ran)."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        errors = simulation_errors(self.screened, self.medians)
        return {
            "version": VERSION,
            "model": self.model,
            "machine": self.machine,
            "load": self.load,
            "objective": str(self.objective),
            "sla": None if self.sla is None else self.sla.to_json(),
            "best": self.best.to_json(),
            "tied": list(self.choice.tied),
            "gain_over_plain": None if self.plain is None else self.gain_over(self.plain),
            "gain_over_auto": None if self.auto is None else self.gain_over(self.auto),
            "reasons": self.reasons(),
            "pareto_front": self.front(),
            "runs": {name: [run.to_json() for run in runs] for name, runs in self.rounds.items()},
            "screened": [one.candidate.to_json() | {"figures": one.figures.to_json()} for one in self.screened],
            "simulation_errors": {
                name: {"throughput": throughput, "latency": latency} for name, (throughput, latency) in errors.items()
            },
            "probed": list(self.probed),
            "num_differing": self.num_differing,
            "seconds": dict(self.seconds),
        }
