"""What `forerun bench compare` found, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.core.stats import PHASES

if TYPE_CHECKING:
    from forerun.bench.comparison import Comparison, Outcome

TEXTUAL = ("texts", "accepted at position 1, 2, ... (%)")


def show(found: Comparison, console: Console) -> None:
    """What was measured with what, speeds and texts, phases and acceptance by position, and what to heed."""
    console.print(f"{found.machine}\n{found.model}, {found.dtype} on {found.device}, kernels: {found.kernels}")
    console.print(
        f"up to {found.max_tokens} tokens, {found.batch_size} prompt(s) at once, temperature {found.temperature:g}, "
        f"memory {found.gigabytes_per_second:.1f} GB/s"
    )
    console.print(_table(f"answers, medians of {found.repeats} interleaved rounds", found, _speeds))
    console.print(_table("drafts", found, _acceptance))
    console.print(_table("a step of decoding, ms", found, _phases))
    for outcome in found.outcomes:
        for note in _notes(outcome):
            console.print(f"{outcome.name}, {outcome.kind}: {note}")


def _table(title: str, found: Comparison, cells: Callable[[Outcome], dict[str, str]]) -> Table:
    """A row for each outcome, under the kind of its prompts."""
    table = Table(title=title)
    table.add_column("")
    for name in cells(found.outcomes[0]):
        table.add_column(name, justify="left" if name in TEXTUAL else "right")
    for kind, outcomes in found.by_kind.items():
        table.add_section()
        table.add_row(Text(kind, style="bold"))
        for outcome in outcomes:
            table.add_row(Text(f"  {outcome.name}"), *cells(outcome).values())
    return table


def _speeds(one: Outcome) -> dict[str, str]:
    return {
        "tokens/s": f"{one.tokens_per_second:.1f}",
        "speed-up": f"{one.speed_up:.2f}",
        "of decoding": "-" if one.decode_speed_up is None else f"{one.decode_speed_up:.2f}",
        "texts": one.texts,
    }


def _acceptance(one: Outcome) -> dict[str, str]:
    rate, length = one.speculation.acceptance_rate, one.speculation.acceptance_length
    return {
        "acceptance rate": "-" if rate is None else f"{rate:.1%}",
        "acceptance length": "-" if length is None else f"{length:.2f}",
        "accepted at position 1, 2, ... (%)": " ".join(
            f"{100 * share:.0f}" for share in one.speculation.acceptance_per_position
        ),
    }


def _phases(one: Outcome) -> dict[str, str]:
    times = one.milliseconds_per_step
    return {phase: f"{times[phase]:.2f}" if times else "-" for phase in PHASES}


def _notes(outcome: Outcome) -> list[str]:
    """What a reader must not overlook."""
    notes = []
    if outcome.num_failed_drafts:
        notes.append(f"the drafter failed {outcome.num_failed_drafts} time(s), see the warning above")
    unexplained = outcome.num_differing - outcome.num_near_ties
    if outcome.must_be_identical and unexplained:
        notes.append(f"{unexplained} text(s) differ beyond near-ties; forerun verify tells what that is")
    return notes
