"""Figures of configurations under the same arrivals, and the requests per second that each serves at equal latency."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.swinging_load.loading import LoadResult
from forerun.bench.outcomes import PLAIN

Latency = Callable[[LoadResult], float]


def mean_latency(result: LoadResult) -> float:
    """Mean seconds from arrival to the last token."""
    return result.mean_latency


def p95_latency(result: LoadResult) -> float:
    """The seconds that 95 % of the requests stay below."""
    return result.p95_latency


@dataclass(frozen=True, slots=True)
class Runs:
    """All results of a benchmark."""

    results: Sequence[LoadResult]

    @property
    def configs(self) -> list[str]:
        """All configurations, in the order of their first results."""
        return [*dict.fromkeys(one.config for one in self.results)]

    @property
    def paces(self) -> list[float]:
        """All paces, rising."""
        return sorted({one.pace for one in self.results})

    def of(self, config: str, pace: float) -> list[LoadResult]:
        """The rounds of a configuration at a pace."""
        return [one for one in self.results if (one.config, one.pace) == (config, pace)]

    def latency_goal(self, latency: Latency) -> float | None:
        """The latency that all are compared at: plain decoding's at the middle pace; None if that was not measured."""
        pace = self.paces[(len(self.paces) - 1) // 2]
        found = self.of(PLAIN, pace)
        return statistics.median(map(latency, found)) if found else None

    def requests_per_second_at(self, config: str, goal: float, latency: Latency) -> float | None:
        """What a configuration serves at this latency, straight between the paces; None beyond what was measured."""
        points = sorted(
            (
                statistics.median(map(latency, found)),
                statistics.median(one.requests_per_second for one in found),
            )
            for pace in self.paces
            if (found := self.of(config, pace))
        )
        for (less, slower), (more, faster) in pairwise(points):
            if less <= goal <= more:
                return slower + (faster - slower) * ((goal - less) / (more - less) if more > less else 1.0)
        return None

    def num_differing(self, config: str) -> int:
        """Texts that are not those that plain decoding wrote for the same request, in any run."""
        plain = {number: text for one in self.results if one.config == PLAIN for number, text in enumerate(one.texts)}
        return sum(
            plain.get(number, text) != text
            for one in self.results
            if one.config == config
            for number, text in enumerate(one.texts)
        )

    def problems(self) -> Iterator[str]:
        """Texts that differ."""
        for config in self.configs:
            if self.num_differing(config):
                yield f"{config}: {self.num_differing(config)} text(s) are not plain decoding's"


def show(runs: Runs, console: Console) -> None:
    """Print the runs, and what each configuration serves at equal latency."""
    console.print(_runs_table(runs))
    table = Table(
        "configuration",
        "requests/s at equal mean latency",
        "of plain",
        "at equal p95 latency",
        "of plain",
        box=box.MARKDOWN,
    )
    for config in runs.configs:
        table.add_row(config, *_at_equal(runs, config, mean_latency), *_at_equal(runs, config, p95_latency))
    console.print(table)
    for latency, name in ((mean_latency, "mean"), (p95_latency, "p95")):
        goal = runs.latency_goal(latency)
        console.print(f"{name} latency: " + ("plain decoding was not measured" if goal is None else f"{goal:.2f} s"))
    for problem in runs.problems():
        console.print(f"error: {problem}")


def _runs_table(runs: Runs) -> Table:
    """Medians over rounds of each configuration at each pace."""
    table = Table(
        *("pace", "configuration", "rounds", "requests/s", "tokens/s", "most running"),
        *("mean latency, s", "p95, s", "to first token, s", "per token, ms"),
        box=box.MARKDOWN,
    )
    for pace in runs.paces:
        for config in runs.configs:
            found = runs.of(config, pace)
            if not found:
                continue
            columns: list[tuple[Latency, str]] = [
                (lambda one: one.requests_per_second, ".2f"),
                (lambda one: one.num_tokens / one.seconds, ".0f"),
                (lambda one: one.most_running, ".0f"),
                (mean_latency, ".2f"),
                (p95_latency, ".2f"),
                (lambda one: one.mean_ttft, ".2f"),
                (lambda one: 1e3 * one.mean_tpot, ".1f"),
            ]
            medians = (f"{statistics.median(map(value, found)):{form}}" for value, form in columns)
            table.add_row(f"{pace:g}", config, str(len(found)), *medians)
    return table


def _at_equal(runs: Runs, config: str, latency: Latency) -> tuple[str, str]:
    """Requests per second at the common latency, and their ratio to plain decoding's."""
    goal = runs.latency_goal(latency)
    served, plain = (
        None if goal is None else runs.requests_per_second_at(name, goal, latency) for name in (config, PLAIN)
    )
    if goal is not None and served is None:  # quicker at all paces, or slower
        beyond = [found for pace in runs.paces if (found := runs.of(config, pace))]
        if beyond and all(statistics.median(map(latency, found)) < goal for found in beyond):
            served = max(statistics.median(one.requests_per_second for one in found) for found in beyond)
            return f"above {served:.2f}", "-" if plain is None else f"above {served / plain:.2f}"
    return (
        "-" if served is None else f"{served:.2f}",
        "-" if served is None or plain is None else f"{served / plain:.2f}",
    )
