"""Prints a run as two tables: the judged configuration against its goals, and every configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.auto_speculation.pieces import Piece
from benchmarks.auto_speculation.summary import Summary, decoding, whole
from forerun.bench.outcomes import PLAIN

GOAL_OF_BEST_STATIC = 0.98
GOAL_OF_EACH_PROMPT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the judged configuration is to reach against plain decoding, and whether it is compared with static ones."""

    plain: float
    is_compared: bool = True


GOALS = {
    "chat-greedy": Goal(plain=1.85),
    "chat-sampled": Goal(plain=1.12),
    "code": Goal(plain=4.0),
    "random": Goal(plain=0.98, is_compared=False),
    "batch-8": Goal(plain=1.15),
    "batch-16": Goal(plain=1.05),
    "batch-32": Goal(plain=1.0),
    "batch-64": Goal(plain=1.0),
}


def summaries(pieces: Sequence[Piece], judged: str) -> dict[str, Summary]:
    """A summary of each workload that was measured, in the order of the goals."""
    measured = {piece.workload for piece in pieces}
    return {name: Summary(pieces, workload=name, judged=judged) for name in GOALS if name in measured}


def show(found: dict[str, Summary], console: Console) -> None:
    """Print both tables, and what must not have happened."""
    console.print(_goals_table(found))
    console.print(_configs_table(found))
    for problem in problems(found):
        console.print(f"error: {problem}")


def problems(found: dict[str, Summary]) -> Iterator[str]:
    """Texts that differ from plain decoding's, and drafters that failed."""
    for workload, summary in found.items():
        for config in summary.configs:
            if summary.num_differing(config):
                yield f"{workload}, {config}: {summary.num_differing(config)} text(s) are not plain decoding's"
            if summary.num_failed_drafts(config):
                yield f"{workload}, {config}: the drafter failed {summary.num_failed_drafts(config)} time(s)"


def _goals_table(found: dict[str, Summary]) -> Table:
    """The judged configuration; each figure with prompts included and of decoding alone, and the goal."""
    judged = next(iter(found.values())).judged if found else ""
    table = Table(
        *("workload", "rounds", "of plain", "decoding", "goal", "worst prompt", "goal", "best static"),
        *("of it", "decoding", "goal", "texts"),
        title=judged,
        box=box.MARKDOWN,
    )
    for workload, summary in found.items():
        goal, alone = GOALS[workload], summary.pieces[0].num_running == 1
        table.add_row(
            workload,
            str(summary.num_rounds),
            _ratio(summary.ratio(judged, PLAIN), goal.plain),
            _ratio(summary.ratio(judged, PLAIN, decoding), goal.plain),
            f"{goal.plain:.2f}",
            _ratio(summary.worst_group(judged).ratio, GOAL_OF_EACH_PROMPT) if alone else "-",
            f"{GOAL_OF_EACH_PROMPT:.2f}" if alone else "-",
            *_against_static(summary, is_judged=goal.is_compared),
            "identical" if not summary.num_differing(judged) else f"{summary.num_differing(judged)} differ",
        )
    return table


def _against_static(summary: Summary, *, is_judged: bool) -> list[str]:
    """Best static configuration, the judged one's ratio to it with prompts and of decoding, the goal."""
    best, best_decoding = summary.best_static(), summary.best_static(decoding)
    if best is None or best_decoding is None:
        return ["-"] * 4
    goal = GOAL_OF_BEST_STATIC if is_judged else 0.0
    names = best if best == best_decoding else f"{best}; decoding {best_decoding}"
    return [
        names,
        _ratio(summary.ratio(summary.judged, best), goal),
        _ratio(summary.ratio(summary.judged, best_decoding, decoding), goal),
        f"{goal:.2f}" if is_judged else "-",
    ]


def _ratio(ratio: float, goal: float) -> str:
    """A ratio, marked if it is below its goal."""
    return f"{ratio:.3f}" if ratio >= goal else f"**{ratio:.3f}**"


def _configs_table(found: dict[str, Summary]) -> Table:
    """Every configuration on every workload."""
    table = Table(
        *("workload", "configuration", "tokens/s", "decoding", "of plain", "decoding", "worst group"),
        *("tokens per step", "rows per step", "drafted rows per step"),
        box=box.MARKDOWN,
    )
    for workload, summary in found.items():
        for config in summary.configs:
            steps = summary.steps(config)
            worst = summary.worst_group(config)
            table.add_row(
                workload,
                config,
                f"{summary.speed(config, whole):.1f}",
                f"{summary.speed(config, decoding):.1f}",
                f"{summary.ratio(config, PLAIN):.3f}",
                f"{summary.ratio(config, PLAIN, decoding):.3f}",
                f"{worst.ratio:.2f} ({worst.group})",
                f"{steps.tokens:.2f}",
                f"{steps.rows:.2f}",
                ", ".join(f"{name} {rows:.2f}" for name, rows in steps.drafted_rows.items()) or "-",
            )
    return table
