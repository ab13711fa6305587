"""How well drafting worked, as JSON and as rows of a table."""

from __future__ import annotations

from forerun.core.stats import SpeculationStats


def speculation_json(stats: SpeculationStats) -> dict[str, object]:
    """Counts and rates of speculation as JSON, in total and by drafter; a rate without data is null."""
    return {
        **_counts_json(stats),
        "by_drafter": {drafter: _counts_json(counts) for drafter, counts in stats.by_drafter.items()},
    }


def _counts_json(stats: SpeculationStats) -> dict[str, object]:
    return {
        "num_steps": stats.num_steps,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
    }


def speculation_rows(stats: SpeculationStats) -> list[tuple[str, str]]:
    """Name and value of the figures that show how well drafting worked."""
    length = stats.acceptance_length
    per_position = " ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
    return [
        ("acceptance rate (accepted / drafted)", _acceptance(stats)),
        ("acceptance length (tokens per step)", "-" if length is None else f"{length:.2f}"),
        ("acceptance per position", per_position or "-"),
        *((f"accepted from {drafter}", _share_of(counts)) for drafter, counts in stats.by_drafter.items()),
    ]


def _acceptance(stats: SpeculationStats) -> str:
    return "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.1%}"


def _share_of(stats: SpeculationStats) -> str:
    """The accepted tokens of one of several drafters."""
    tokens = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens"
    return f"{tokens} in {stats.num_drafts} drafts ({_acceptance(stats)})"
